"""Ollama's lists of models: those there are, those loaded, and the facts of one."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timezone

from zmqengine.protocol.launcher import ModelEntry
from zmqengine_http.apis.models import capabilities
from zmqengine_http.apis.ollama.request import OllamaModelRequest
from zmqengine_http.endpoint import Service
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model

API_VERSION = "0.13.0"
"""The version of Ollama whose requests are understood: clients look for a minimum, which ours would not meet."""
_STARTED = datetime.fromtimestamp(int(time.time()), timezone.utc).isoformat().replace("+00:00", "Z")
_NEVER = "2318-01-01T00:00:00Z"
"""A model stays loaded; this is the time that Ollama itself gives for `keep_alive: -1`."""


async def tags(service: Service, exchange: Exchange) -> None:
    """GET /api/tags: the models of all workers, or of the launcher."""
    if service.launched is not None:
        entries = sorted(service.launched.entries.values(), key=lambda entry: entry.name)
        await exchange.send_json({"models": [_entry_card(entry) for entry in entries if not entry.never]})
        return
    models = sorted(service.pool.models().items())
    await exchange.send_json({"models": [_card(name, model) for name, model in models]})


async def ps(service: Service, exchange: Exchange) -> None:
    """GET /api/ps: the loaded models: all of them, or a launcher's loaded ones."""
    if service.launched is not None:
        entries = sorted(service.launched.entries.values(), key=lambda entry: entry.name)
        await exchange.send_json({"models": [_loaded(entry) for entry in entries if entry.state == "ready"]})
        return
    models = sorted(service.pool.models().items())
    loaded = [
        {
            **_card(name, model),
            "expires_at": _NEVER,
            "size_vram": model.card.parameter_bytes,
            "context_length": model.context_tokens,
        }
        for name, model in models
    ]
    await exchange.send_json({"models": loaded})


async def show(service: Service, exchange: Exchange, request: OllamaModelRequest) -> None:
    """POST /api/show: one model's template, context and capabilities, or what the files tell of one that is not
    loaded."""
    if service.launched is not None:
        entry = service.launched.entry(request.wanted)
        if entry.name not in service.pool.models():
            await exchange.send_json(_unloaded(entry))
            return
    model = service.pool.model(request.wanted)
    await exchange.send_json(
        {
            "modelfile": "",
            "parameters": "\n".join(
                f"{name} {value}" for name, value in model.sampling_defaults._asdict().items()
            ),
            "template": model.tokenizer.template_for(tools=False) or "",
            "details": _details(),
            "model_info": {
                "general.architecture": "mlx",
                "general.basename": model.card.name,
                "mlx.context_length": model.context_tokens,
                "mlx.vocab_size": model.card.vocab_size,
            },
            "capabilities": capabilities(model),
            "modified_at": _STARTED,
        }
    )


async def version(service: Service, exchange: Exchange) -> None:
    """GET /api/version."""
    await exchange.send_json({"version": API_VERSION})


def _card(name: str, model: Model) -> dict[str, object]:
    card = model.card
    return {
        "name": name,
        "model": name,
        "modified_at": _STARTED,
        "size": card.parameter_bytes,
        # The worker knows no digest of the weights: this one tells models apart.
        "digest": hashlib.sha256(f"{card.name} {card.tokenizer_hash}".encode()).hexdigest(),
        "details": _details(),
    }


def _entry_card(entry: ModelEntry) -> dict[str, object]:
    details = _details() | {"family": entry.model_type, "quantization_level": entry.quantisation}
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _STARTED,
        "size": entry.size_bytes,
        "digest": hashlib.sha256(f"{entry.name} {entry.path}".encode()).hexdigest(),
        "details": details,
    }


def _loaded(entry: ModelEntry) -> dict[str, object]:
    expires = _NEVER
    if entry.ttl_s >= 0 and not entry.pin:
        left_s = entry.ttl_s if entry.expires_s is None else entry.expires_s
        moment = datetime.fromtimestamp(int(time.time() + left_s), timezone.utc)
        expires = moment.isoformat().replace("+00:00", "Z")
    return {
        **_entry_card(entry),
        "expires_at": expires,
        "size_vram": entry.need_bytes,
        "context_length": entry.context_tokens,
    }


def _unloaded(entry: ModelEntry) -> dict[str, object]:
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _entry_card(entry)["details"],
        "model_info": {"general.architecture": "mlx", "mlx.context_length": entry.context_tokens},
        "capabilities": entry.capabilities,
        "modified_at": _STARTED,
    }


def _details() -> dict[str, object]:
    return {
        "parent_model": "", "format": "mlx", "family": "mlx", "families": ["mlx"], "parameter_size": "",
        "quantization_level": "",
    }  # fmt: skip
