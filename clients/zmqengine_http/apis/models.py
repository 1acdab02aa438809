"""GET /v1/models, in the shape of whoever asks."""

from __future__ import annotations

import time

from zmqengine_http.apis.anthropic import models as anthropic_models
from zmqengine_http.apis.responses.codex_models import codex_models
from zmqengine_http.endpoint import get
from zmqengine_http.service import Service
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model

_STARTED = int(time.time())


async def list_models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models: the models of all workers, and their aliases."""
    if _for_anthropic(exchange):
        await exchange.send_json(anthropic_models.model_list(service.pool.models()))
        return
    if b"client_version=" in exchange.scope["query_string"]:
        await exchange.send_json(codex_models(sorted(service.pool.models().items())))
        return
    cards = [_card(name, model) for name, model in sorted(service.pool.models().items())]
    await exchange.send_json({"object": "list", "data": cards})


async def get_model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}; names may hold slashes."""
    name = exchange.scope["path_params"]["id"]
    if not name:
        return await list_models(service, exchange)
    if _for_anthropic(exchange):
        await exchange.send_json(anthropic_models.model_info(name, service.pool.model(name)))
        return
    await exchange.send_json(_card(name, service.pool.model(name)))


def _for_anthropic(exchange: Exchange) -> bool:
    return exchange.header(b"anthropic-version") is not None


def _card(name: str, model: Model) -> dict[str, object]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "zmqengine",
        "root": model.card.name, "max_model_len": model.card.context_tokens,
        "sampling_defaults": model.sampling_defaults._asdict(),
    }  # fmt: skip


ENDPOINTS = (
    get("/v1/models", list_models, "The models there are"),
    get("/v1/models/{id:path}", get_model, "One model"),
)
