"""GET /v1/models in three formats: OpenAI's, Anthropic's, and Codex's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs

from zmqengine.protocol.launcher import ModelEntry
from zmqengine_http.endpoint import Service, get
from zmqengine_http.prompt.template import takes_tools
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.launched import ONLY_KEY, LaunchedModels
from zmqengine_http.workers.worker import ADAPTER_MARK, Model

_STARTED = int(time.time())
_ANTHROPIC_CREATED = "1970-01-01T00:00:00Z"
"""The creation time of a model is not known."""
_PAGE_MAX = 1000
"""Anthropic's longest page."""
_STATUS = {"ready": "loaded", "draining": "unloaded", "failed": "unloaded"}
"""llama.cpp's words for states, where they differ: it has three."""
_CODEX_INSTRUCTIONS = (
    "You are a coding agent that runs in a terminal on the user's computer. You read and change files and run "
    "commands with the tools you are given. Keep going until the user's task is done, check what you changed, and "
    "then say briefly what you did. Do not invent the contents of files or the output of commands: look."
)


async def list_models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models: the models of all workers, and their aliases."""
    if service.launched is not None:
        await _list_launched(service, service.launched, exchange)
        return
    if _for_anthropic(exchange):
        await exchange.send_json(anthropic_models(service.pool.models(), _query(exchange)))
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
    if service.launched is not None:
        entry = service.launched.entry(name)
        card = _anthropic_card(name, entry) if _for_anthropic(exchange) else launched_card(entry, name)
        await exchange.send_json(card)
        return
    model = service.pool.model(name)
    await exchange.send_json(anthropic_model(name, model) if _for_anthropic(exchange) else _card(name, model))


def _query(exchange: Exchange) -> dict[str, str]:
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    return {name: values[-1] for name, values in query.items()}


def _for_anthropic(exchange: Exchange) -> bool:
    return exchange.header(b"anthropic-version") is not None


def _card(name: str, model: Model) -> dict[str, object]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "zmqengine",
        "root": model.card.name, "max_model_len": model.context_tokens,
        **({"parent": model.card.name} if model.adapter else {}), **_facts(model),
    }  # fmt: skip


def _facts(model: Model) -> dict[str, object]:
    """Facts that only a loaded model tells."""
    return {"capabilities": capabilities(model), "sampling_defaults": model.sampling_defaults._asdict()}


async def _list_launched(service: Service, launched: LaunchedModels, exchange: Exchange) -> None:
    """The models of a launcher, loaded or not, their aliases, and their adapters."""
    only, loaded = exchange.scope.get(ONLY_KEY), service.pool.models()
    named = sorted(
        (f"{name}{behind}", entry)
        for entry in launched.entries.values()
        for name in (entry.name, *entry.aliases)
        for behind in ("", *_adapters_of(entry, loaded.get(entry.name)))
        if only is None or name.replace("/", "--") == only
    )
    if _for_anthropic(exchange):
        cards = {name: _anthropic_card(name, entry) for name, entry in named}
        await exchange.send_json(_anthropic_page(cards, _query(exchange)))
    elif b"client_version=" in exchange.scope["query_string"]:
        models = [
            _codex_model(
                index,
                name,
                entry.name,
                entry.context_tokens,
                reasons=False,
                tools=True,
                sees="vision" in entry.capabilities,
            )
            for index, (name, entry) in enumerate(named)
        ]
        await exchange.send_json({"models": models})
    else:
        listed = [
            launched_card(entry, name) | (_facts(loaded[entry.name]) if entry.name in loaded else {})
            for name, entry in named
        ]
        await exchange.send_json({"object": "list", "data": listed})


def _adapters_of(entry: ModelEntry, model: Model | None) -> list[str]:
    """The ends of the names of a model with its adapters: those that it has, or will have once it is loaded."""
    adapters = entry.adapters if model is None else model.card.adapters
    return [f"{ADAPTER_MARK}{adapter}" for adapter in adapters]


def status_word(entry: ModelEntry) -> str:
    """The state of a model in llama.cpp's word for it."""
    return _STATUS.get(entry.state, entry.state)


def launched_card(entry: ModelEntry, name: str = "") -> dict[str, object]:
    """One model of a launcher; `status` is in llama.cpp's words, the rest of the entry in `zmqengine`."""
    status: dict[str, object] = {"value": status_word(entry)}
    if entry.state == "failed" or entry.never:
        status |= {"failed": True, "exit_code": entry.exit_code}
    if entry.fraction is not None:
        status["progress"] = entry.fraction
    facts = {
        field: getattr(entry, field)
        for field in entry.__struct_fields__
        if field not in ("name", "address", "path", "pid")
    }
    return {
        "id": name or entry.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "zmqengine",
        "root": entry.name,
        "max_model_len": entry.context_tokens,
        "status": status,
        "zmqengine": facts,
    }


def _anthropic_card(name: str, entry: ModelEntry) -> dict[str, object]:
    return {
        "type": "model",
        "id": name,
        "display_name": entry.name,
        "created_at": _ANTHROPIC_CREATED,
        "max_input_tokens": entry.context_tokens,
        "max_tokens": entry.context_tokens,
    }


def anthropic_models(models: Mapping[str, Model], query: Mapping[str, str] = {}) -> dict[str, object]:
    """Anthropic's list of models: the page that `limit`, `after_id` and `before_id` ask for.

    Raises a 400 for a limit that is none.
    """
    return _anthropic_page({name: anthropic_model(name, model) for name, model in models.items()}, query)


def _anthropic_page(cards: Mapping[str, object], query: Mapping[str, str]) -> dict[str, object]:
    names = sorted(cards)
    if query.get("after_id") in cards:
        names = [name for name in names if name > query["after_id"]]
    backwards = query.get("before_id") in cards
    if backwards:
        names = [name for name in names if name < query["before_id"]]
    limit_text = query.get("limit", "1000")
    if not limit_text.isascii() or not limit_text.isdigit() or not 1 <= int(limit_text[:5]) <= _PAGE_MAX:
        raise bad_field("limit", f"a number from 1 to {_PAGE_MAX}")
    shown = names[-int(limit_text) :] if backwards else names[: int(limit_text)]
    return {
        "data": [cards[name] for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def anthropic_model(name: str, model: Model) -> dict[str, object]:
    """One model in Anthropic's format."""
    return {
        "type": "model",
        "id": name,
        "display_name": model.card.name,
        "created_at": _ANTHROPIC_CREATED,
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.context_tokens,
    }


def codex_models(models: Iterable[tuple[str, Model]]) -> dict[str, object]:
    """The list of models as Codex parses it: one missing field voids the list.

    Source: codex-rs/protocol, `ModelInfo`.
    """
    return {
        "models": [
            _codex_model(
                index, name, model.card.name, model.context_tokens,
                reasons=bool(model.markers.think_end or model.markers.harmony), tools=takes_tools(model),
                sees=model.tokenizer.vision is not None,
            )
            for index, (name, model) in enumerate(models)
        ]
    }  # fmt: skip


def _codex_model(
    place: int, name: str, served: str, context_tokens: int, *, reasons: bool, tools: bool, sees: bool = False
) -> dict[str, object]:
    return {
        "slug": name,
        "display_name": name,
        "description": f"{served}, served by zmqengine",
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": reasons,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": tools,
        # Without it Codex takes the model for one that sees images, and offers it a tool to view them.
        "input_modalities": ["text", "image"] if sees else ["text"],
        "context_window": context_tokens,
        "experimental_supported_tools": [],
    }


def capabilities(model: Model) -> list[str]:
    """Abilities of the model, in Ollama's words."""
    abilities = ["completion"] if model.card.generates else ["embedding"] if model.card.dimensions else []
    if model.tokenizer.vision is not None:
        abilities.append("vision")
    if takes_tools(model):
        abilities.append("tools")
    if model.markers.think_end or model.markers.harmony:
        abilities.append("thinking")
    return abilities


ENDPOINTS = (
    get("/v1/models", list_models, "The models there are"),
    get("/v1/models/{id:path}", get_model, "One model"),
)
