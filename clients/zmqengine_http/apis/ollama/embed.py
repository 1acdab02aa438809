"""POST /api/embed and /api/embeddings: vectors, in Ollama's words."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from zmqengine_http.apis.embeddings import client_of, floats_of, send_floats
from zmqengine_http.apis.embeddings.request import PositiveInt
from zmqengine_http.endpoint import Service
from zmqengine_http.generating.generation import caller_salt
from zmqengine_http.serving.body import Body, reported
from zmqengine_http.serving.exchange import Exchange

_REPORTED = (
    reported("options", "they say how to generate"),
    reported("keep_alive", "the launcher's own option decides"),
)


class OllamaEmbedRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/embed. Texts that are too long are cut unless `truncate` is false, as by Ollama."""

    model: str
    input: str | Annotated[list[str], Meta(min_length=1)]
    truncate: bool = True
    dimensions: PositiveInt | None = None


class OllamaEmbeddingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/embeddings, the older endpoint of one text."""

    model: str
    prompt: str


EMBED_BODY = Body(OllamaEmbedRequest, _REPORTED, unknown_ignored=True)
OLD_EMBED_BODY = Body(OllamaEmbeddingRequest, _REPORTED, unknown_ignored=True)


async def embed(service: Service, exchange: Exchange, request: OllamaEmbedRequest) -> None:
    """Respond with the vector of each input."""
    started_ns = time.monotonic_ns()
    texts = [request.input] if isinstance(request.input, str) else request.input
    model = service.pool.model(request.model)
    with client_of(service, exchange, model) as client:
        embedded = await client.embed_counted(
            texts,
            dimensions=request.dimensions,
            truncate=request.truncate,
            cache_salt=caller_salt(exchange.caller, None, model),
        )

    def document() -> bytes:
        return msgspec.json.encode(
            {
                "model": request.model,
                "embeddings": [floats_of(vector) for vector in embedded.vectors],
                "total_duration": time.monotonic_ns() - started_ns,
                "load_duration": 0,
                "prompt_eval_count": embedded.tokens,
            }
        )

    await send_floats(exchange, embedded, document)


async def old_embed(service: Service, exchange: Exchange, request: OllamaEmbeddingRequest) -> None:
    """Respond with the vector of one text."""
    model = service.pool.model(request.model)
    with client_of(service, exchange, model) as client:
        embedded = await client.embed_counted(
            [request.prompt], truncate=True, cache_salt=caller_salt(exchange.caller, None, model)
        )
    await send_floats(
        exchange, embedded, lambda: msgspec.json.encode({"embedding": floats_of(embedded.vectors[0])})
    )
