"""The small endpoints: models, tokenize, detokenize, health, readiness."""

from __future__ import annotations

import time

import msgspec

from zmqengine_http.errors import ApiError, no_worker
from zmqengine_http.exchange import JSON, Exchange
from zmqengine_http.generate import Service
from zmqengine_http.prompts import encode_chat
from zmqengine_http.reading import read_detokenize, read_tokenize
from zmqengine_http.requests import TokenizeRequest
from zmqengine_http.sampling import check_ids
from zmqengine_http.worker import Model

_STARTED = int(time.time())


async def list_models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models: the models of all workers, and their aliases."""
    cards = [_card(name, model) for name, model in sorted(service.pool.models().items())]
    await _send(exchange, {"object": "list", "data": cards})


async def get_model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}; names may hold slashes."""
    name = exchange.scope["path_params"]["id"]
    await _send(exchange, _card(name, service.pool.model(name)))


async def tokenize(service: Service, exchange: Exchange) -> None:
    """POST /tokenize: the token ids of a text or a chat."""
    request = read_tokenize(await exchange.read_body(service.config.body_bytes_max))
    model = service.pool.model(request.model)
    tokens = await service.tokenizing.run(
        exchange.id, exchange.body_bytes, lambda: _tokenize(model, request), len
    )
    answer: dict[str, object] = {
        "count": len(tokens), "max_model_len": model.card.context_tokens, "tokens": tokens,
        "token_strs": [model.token_text(token) for token in tokens] if request.return_token_strs else None,
    }  # fmt: skip
    await _send(exchange, answer)


async def detokenize(service: Service, exchange: Exchange) -> None:
    """POST /detokenize: the text of token ids."""
    request = read_detokenize(await exchange.read_body(service.config.body_bytes_max))
    model = service.pool.model(request.model)
    check_ids("tokens", request.tokens, model)
    text = await service.tokenizing.run(
        exchange.id,
        exchange.body_bytes,
        lambda: model.tokenizer.decode(request.tokens, skip_special_tokens=False),
        len,
    )
    await _send(exchange, {"prompt": text})


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health: this process is alive."""
    await _send(exchange, {"status": "ok"})


async def ready(service: Service, exchange: Exchange) -> None:
    """GET /ready: a worker takes requests; 503 until then."""
    if not service.pool.ready:
        raise no_worker("any model")
    workers = [
        {
            "address": worker.address,
            "model": worker.model.card.name if worker.model else None,
            "ready": worker.ready,
        }
        for worker in service.pool.workers
    ]
    await _send(exchange, {"status": "ready", "workers": workers})


def _tokenize(model: Model, request: TokenizeRequest) -> list[int]:
    if request.messages is not None:
        return encode_chat(model, request.messages, request.tools, request.chat_template_kwargs).tokens
    return model.tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)


def _card(name: str, model: Model) -> dict[str, object]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "zmqengine",
        "root": model.card.name, "max_model_len": model.card.context_tokens,
    }  # fmt: skip


async def _send(exchange: Exchange, document: dict[str, object]) -> None:
    await exchange.send(200, [JSON], msgspec.json.encode(document))


def not_found(path: str) -> ApiError:
    """The 404 of a path that is no endpoint."""
    return ApiError(404, f"there is no endpoint {path[:200]}", code="unknown_url")
