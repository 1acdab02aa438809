"""GET /v1/models in three formats: OpenAI's, Anthropic's, and Codex's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from zmqengine_http.endpoint import Service, get
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model

_STARTED = int(time.time())
_ANTHROPIC_CREATED = "1970-01-01T00:00:00Z"
"""The creation time of a model is not known."""
_CODEX_INSTRUCTIONS = (
    "You are a coding agent that runs in a terminal on the user's computer. You read and change files and run "
    "commands with the tools you are given. Keep going until the user's task is done, check what you changed, and "
    "then say briefly what you did. Do not invent the contents of files or the output of commands: look."
)


async def list_models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models: the models of all workers, and their aliases."""
    if _for_anthropic(exchange):
        await exchange.send_json(anthropic_models(service.pool.models()))
        return
    if b"client_version=" in exchange.scope["query_string"]:
        await exchange.send_json(codex_models(sorted(service.pool.models().items())))
        return
    cards = [_card(name, model) for name, model in sorted(service.pool.models().items())]
    await exchange.send_json({"object": "list", "data": cards})


async def get_model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}; names may contain slashes."""
    name = exchange.scope["path_params"]["id"]
    if not name:
        return await list_models(service, exchange)
    model = service.pool.model(name)
    await exchange.send_json(anthropic_model(name, model) if _for_anthropic(exchange) else _card(name, model))


def _for_anthropic(exchange: Exchange) -> bool:
    return exchange.header(b"anthropic-version") is not None


def _card(name: str, model: Model) -> dict[str, object]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "zmqengine",
        "root": model.card.name, "max_model_len": model.card.context_tokens,
        "sampling_defaults": model.sampling_defaults._asdict(),
    }  # fmt: skip


def anthropic_models(models: Mapping[str, Model]) -> dict[str, object]:
    """Anthropic's list of models, all on one page."""
    data = [anthropic_model(name, model) for name, model in sorted(models.items())]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def anthropic_model(name: str, model: Model) -> dict[str, object]:
    """One model in Anthropic's format."""
    return {
        "type": "model",
        "id": name,
        "display_name": model.card.name,
        "created_at": _ANTHROPIC_CREATED,
        "max_input_tokens": model.card.context_tokens,
        "max_tokens": model.card.context_tokens,
    }


def codex_models(models: Iterable[tuple[str, Model]]) -> dict[str, object]:
    """The list of models as Codex parses it: one missing field voids the list.

    Source: codex-rs/protocol, `ModelInfo`.
    """
    return {"models": [_codex_model(place, name, model) for place, (name, model) in enumerate(models)]}


def _codex_model(place: int, name: str, model: Model) -> dict[str, object]:
    return {
        "slug": name,
        "display_name": name,
        "description": f"{model.card.name}, served by zmqengine",
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": bool(model.markers.think_end or model.markers.harmony),
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": model.card.context_tokens,
        "experimental_supported_tools": [],
    }


ENDPOINTS = (
    get("/v1/models", list_models, "The models there are"),
    get("/v1/models/{id:path}", get_model, "One model"),
)
