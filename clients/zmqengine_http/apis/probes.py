"""GET /health and GET /ready, for supervisors, load balancers and clients that look before they ask."""

from __future__ import annotations

from zmqengine_http.endpoint import Service, get
from zmqengine_http.serving.errors import no_worker
from zmqengine_http.serving.exchange import Exchange


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health: this process is alive."""
    await exchange.send_json({"status": "ok"})


async def ready(service: Service, exchange: Exchange) -> None:
    """GET /ready: a worker takes requests, or a launcher loads models on demand; 503 until then."""
    if not service.pool.ready and not (service.launched and service.launched.entries):
        raise no_worker()
    workers = [
        {"model": worker.model.card.name if worker.model else None, "ready": worker.ready}
        for worker in service.pool.workers
    ]
    await exchange.send_json({"status": "ready", "workers": workers})


ENDPOINTS = (
    get("/health", health, "Whether this process is alive", open=True),
    get("/ready", ready, "Whether a worker takes requests", open=True),
)
