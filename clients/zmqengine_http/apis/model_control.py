"""Loading and unloading of a launcher's models: llama.cpp's and LM Studio's forms, and events for a page.

Sources: tools/server/README.md of llama.cpp (router mode: /models, /models/load, /models/unload,
/models/sse), LM Studio's REST API
v1 (/api/v1/models, /api/v1/models/load, /api/v1/models/unload).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from zmqengine.protocol.launcher import ModelChanges, ModelEntry
from zmqengine_http.answers.respond import COMMENT
from zmqengine_http.apis.models import launched_card, list_models, status_word
from zmqengine_http.endpoint import Service, get, post
from zmqengine_http.serving.body import Body
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.serving.exchange import EVENT_STREAM, Exchange
from zmqengine_http.workers.launched import LaunchedModels, keep_alive_seconds


class ModelCommand(Struct, frozen=True, kw_only=True):
    """The body of load and unload; `instance_id` is LM Studio's word for a loaded model."""

    model: str | None = None
    instance_id: str | None = None
    keep_alive: float | str | None = None
    ttl: float | None = None
    pinned: bool | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Raises a 400 without one."""
        name = self.model or self.instance_id
        if not name:
            raise bad_field("model", "name the model")
        return name


COMMAND_BODY = Body(ModelCommand, unknown_ignored=True)


async def load(service: Service, exchange: Exchange, request: ModelCommand) -> None:
    """POST /models/load: begin to load; the list and the events tell how far it is."""
    launched = _launched(service)
    exchange.check_operates()
    await launched.launcher.load(
        launched.name_of(request.wanted), keep_alive_s=keep_alive_seconds(request.ttl, request.keep_alive)
    )
    await exchange.send_json({"success": True})


async def load_and_wait(service: Service, exchange: Exchange, request: ModelCommand) -> None:
    """POST /api/v1/models/load, as LM Studio has it: the response comes when the model is loaded."""
    launched = _launched(service)
    exchange.check_operates()
    began_s = asyncio.get_running_loop().time()
    keep_s = keep_alive_seconds(request.ttl, request.keep_alive)
    name = await launched.load(request.wanted, keep_s)
    seconds = round(asyncio.get_running_loop().time() - began_s, 3)
    await exchange.send_json(
        {"type": "llm", "instance_id": name, "load_time_seconds": seconds, "status": "loaded"}
    )


async def unload(service: Service, exchange: Exchange, request: ModelCommand) -> None:
    """POST /models/unload: let the model go once its running requests have ended."""
    launched = _launched(service)
    exchange.check_operates()
    name = await launched.unload(request.wanted, pinned=exchange.unloads_pinned)
    await exchange.send_json({"success": True, "instance_id": name})


async def events(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/events: every change of a model, as server-sent events; first all models."""
    await _send_events(service, exchange, _ours)


async def llama_events(service: Service, exchange: Exchange) -> None:
    """GET /models/sse: the same in llama.cpp's form, an event for each model."""
    await _send_events(service, exchange, _llama)


async def lm_studio_models(service: Service, exchange: Exchange) -> None:
    """GET /api/v1/models: the models as LM Studio lists them."""
    entries = _launched(service).entries.values()
    await exchange.send_json({"models": [_lm_studio(entry) for entry in entries if not entry.never]})


_Events = Callable[[ModelChanges], Iterator[dict[str, object]]]


async def _send_events(service: Service, exchange: Exchange, events_of: _Events) -> None:
    launched, keepalive_s = _launched(service), service.config.keepalive_ms / 1000

    async def send() -> None:
        with launched.reading() as changes:
            await exchange.start(200, EVENT_STREAM)
            while True:
                try:
                    changed = await asyncio.wait_for(changes.get(), keepalive_s)
                except asyncio.TimeoutError:
                    await exchange.write(COMMENT)
                    continue
                for event in events_of(changed):
                    await exchange.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    await exchange.unless_gone(send())


def _ours(changes: ModelChanges) -> Iterator[dict[str, object]]:
    yield {"models": [launched_card(entry) for entry in changes.models], "gone": changes.gone}


def _llama(changes: ModelChanges) -> Iterator[dict[str, object]]:
    for entry in changes.models:
        data: dict[str, object] = {"status": status_word(entry)}
        if entry.state == "loading":
            data["progress"] = {"stages": [entry.stage], "current": entry.stage, "value": entry.fraction}
        yield {"model": entry.name, "event": "model_status", "data": data}
    for name in changes.gone:
        yield {"model": name, "event": "model_remove"}


def _lm_studio(entry: ModelEntry) -> dict[str, object]:
    return {
        "type": "llm",
        "key": entry.name,
        "display_name": entry.name,
        "architecture": entry.model_type,
        "quantization": {"name": entry.quantisation} if entry.quantisation else None,
        "size_bytes": entry.size_bytes,
        "max_context_length": entry.context_tokens,
        "format": "mlx",
        "loaded_instances": [{"id": entry.name}] if entry.state == "ready" else [],
    }


def _launched(service: Service) -> LaunchedModels:
    if service.launched is None:
        raise ApiError(
            501,
            "this front-end has workers of its own: models are loaded and unloaded by `zmqengine serve`",
            code="not_a_launcher",
        )
    return service.launched


_LOAD, _UNLOAD = "Load a model", "Unload a model once its running requests have ended"
ENDPOINTS = (
    get("/models", list_models, "The models there are, with their status"),
    get("/v1/models/events", events, "Every change of a model, as server-sent events"),
    get("/models/sse", llama_events, "Every change of a model, in llama.cpp's form"),
    get("/api/v1/models", lm_studio_models, "The models there are, as LM Studio lists them"),
    post("/models/load", COMMAND_BODY, load, _LOAD, needs_model=False),
    post("/v1/models/load", COMMAND_BODY, load, _LOAD, needs_model=False),
    post("/api/v1/models/load", COMMAND_BODY, load_and_wait, _LOAD + ", and wait for it", needs_model=False),
    post("/models/unload", COMMAND_BODY, unload, _UNLOAD, needs_model=False),
    post("/v1/models/unload", COMMAND_BODY, unload, _UNLOAD, needs_model=False),
    post("/api/v1/models/unload", COMMAND_BODY, unload, _UNLOAD, needs_model=False),
)
