"""GET /v1/models."""

from __future__ import annotations

import time

from zmqengine_http.endpoint import get
from zmqengine_http.exchange import Exchange
from zmqengine_http.service import Service
from zmqengine_http.worker import Model

_STARTED = int(time.time())


async def list_models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models: the models of all workers, and their aliases."""
    cards = [_card(name, model) for name, model in sorted(service.pool.models().items())]
    await exchange.send_json({"object": "list", "data": cards})


async def get_model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}; names may hold slashes."""
    name = exchange.scope["path_params"]["id"]
    await exchange.send_json(_card(name, service.pool.model(name)))


def _card(name: str, model: Model) -> dict[str, object]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "zmqengine",
        "root": model.card.name, "max_model_len": model.card.context_tokens,
    }  # fmt: skip


ENDPOINTS = (
    get("/v1/models", list_models, "The models there are"),
    get("/v1/models/{id:path}", get_model, "One model"),
)
