"""GET /metrics: this front-end and its workers for Prometheus, and GET /status: the same for the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from zmqengine.protocol.launcher import ModelEntry
from zmqengine.protocol.messages import Description, Status
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.endpoint import Service, get
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import PooledWorker
from zmqengine_metrics.families import families, model_families
from zmqengine_metrics.snapshot import Snapshot

ANSWER_S = 2.0
"""Time limit of a worker's answer, beyond which it counts as silent in this scrape."""


class _Families(Collector):
    def __init__(self, snapshots: list[Snapshot], models: list[ModelEntry] | None) -> None:
        self._snapshots = snapshots
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield from families(self._snapshots)
        if self._models is not None:
            yield from model_families(self._models)


async def metrics(service: Service, exchange: Exchange) -> None:
    """GET /metrics, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    launched = service.launched
    models = None if launched is None else list(launched.entries.values())
    registry.register(_Families(await _snapshots(service), models))
    body = generate_latest(registry) + service.meter.exposition()
    await exchange.send(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)


async def status(service: Service, exchange: Exchange) -> None:
    """GET /status: the status of every worker.

    With API keys, which separate users, sessions and requests are left out.
    """
    shared = bool(service.config.keys)
    workers = [_worker(snapshot, hide_others=shared) for snapshot in await _snapshots(service)]
    await exchange.send_json({"time": time.time(), "workers": workers})


async def _snapshots(service: Service) -> list[Snapshot]:
    return list(await asyncio.gather(*(_snapshot(worker) for worker in service.pool.workers)))


async def _snapshot(worker: PooledWorker) -> Snapshot:
    client = worker.connected
    before = worker.model.card.name if worker.model else ""
    if client is None:
        return Snapshot(worker.address, model_before=before)

    async def ask() -> tuple[Description, Status]:
        return await client.describe(), await client.status()

    try:
        return Snapshot(worker.address, *await asyncio.wait_for(ask(), ANSWER_S), before)
    except (ZmqEngineError, asyncio.TimeoutError):
        return Snapshot(worker.address, model_before=before)


def _worker(snapshot: Snapshot, *, hide_others: bool) -> dict[str, object]:
    if snapshot.status is None or snapshot.description is None:
        return {"address": snapshot.worker, "state": "silent"}
    now = snapshot.status
    return {
        "address": snapshot.worker,
        "state": now.state,
        "progress": msgspec.to_builtins(snapshot.description.progress),
        "version": snapshot.description.version,
        "epoch": now.epoch.hex(),
        "model": snapshot.model,
        "uptime_s": now.uptime_s,
        "numbers": now.numbers,
        "memory": now.memory,
        "sessions": [] if hide_others else [_whole(session) for session in now.sessions],
        "requests": [] if hide_others else [_whole(request) for request in now.requests],
    }


def _whole(info: msgspec.Struct) -> dict[str, object]:
    """All fields, including the defaults that the wire omits."""
    return {name: getattr(info, name) for name in info.__struct_fields__}


ENDPOINTS = (
    get("/metrics", metrics, "Metrics for Prometheus"),
    get("/status", status, "What the workers are doing"),
)
