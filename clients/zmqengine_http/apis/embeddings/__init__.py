"""POST /v1/embeddings, OpenAI's API; POST /embed, that of text-embeddings-inference (TEI); and POST /v1/rerank, /rerank
and /v2/rerank, those of Jina, Cohere and TEI."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from zmqengine_client import AsyncClient
from zmqengine_client.core.embedding import Embedded
from zmqengine_http.apis.embeddings.request import (
    EMBEDDING_BODY,
    RERANK_BODY,
    TEI_EMBED_BODY,
    EmbeddingRequest,
    RerankRequest,
    TeiEmbedRequest,
)
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.generation import check_ids
from zmqengine_http.serving.exchange import JSON, Exchange
from zmqengine_http.workers.worker import Model

if TYPE_CHECKING:
    import numpy as np

FLOATS_AT_ONCE = 1 << 14
"""Floats from which they are written as text in a thread: that takes milliseconds, for which streams would wait."""


async def answer_embeddings(service: Service, exchange: Exchange, request: EmbeddingRequest) -> None:
    """Respond with the vector of each input."""
    model = service.pool.model(request.model)
    embedded = await _embedded(service, exchange, model, "input", request)
    name = request.model or model.card.name
    await send_floats(
        exchange, embedded, lambda: embeddings_document(embedded, name, request.encoding_format)
    )


async def answer_tei(service: Service, exchange: Exchange, request: TeiEmbedRequest) -> None:
    """Respond with the vector of each input, a list of lists."""
    model = service.pool.model(request.model)
    embedded = await _embedded(service, exchange, model, "inputs", request)
    await send_floats(
        exchange, embedded, lambda: msgspec.json.encode([floats_of(each) for each in embedded.vectors])
    )


async def _embedded(
    service: Service,
    exchange: Exchange,
    model: Model,
    name: str,
    request: EmbeddingRequest | TeiEmbedRequest,
) -> Embedded:
    """The vectors of a request whose inputs are in the field `name`."""
    texts = request.texts
    for text in texts:
        if not isinstance(text, str):
            check_ids(name, text, model)
    with client_of(service, exchange, model) as client:
        return await client.embed_counted(
            texts,
            dimensions=request.dimensions,
            prompt=request.prompt_name,
            **request.options(exchange.caller, model),
        )


def embeddings_document(made: Embedded, model: str, encoding_format: str) -> bytes:
    """The response in OpenAI's shape."""
    encode = base64_of if encoding_format == "base64" else floats_of
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(made.vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": made.tokens, "total_tokens": made.tokens},
        }
    )


def floats_of(vector: np.ndarray) -> msgspec.Raw:
    """A vector as numbers, written alone: one call for all of them would keep the GIL for seconds."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def base64_of(vector: np.ndarray) -> str:
    """A vector as the base64 of its 32-bit floats, little-endian."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@contextlib.contextmanager
def client_of(service: Service, exchange: Exchange, model: Model) -> Iterator[AsyncClient]:
    """The client of a worker of the model; the worker's request count includes this one inside the context. Raises a
    503."""
    exchange.facts["model"] = model.card.name
    worker = service.pool.choose(model, [], None)
    worker.running += 1
    try:
        yield worker.client
    finally:
        worker.running -= 1


async def send_floats(exchange: Exchange, made: Embedded, document: Callable[[], bytes]) -> None:
    """Send a document, written in a thread where it is long."""
    exchange.facts |= {"texts": len(made.vectors), "tokens": made.tokens}
    body = document() if made.vectors.size <= FLOATS_AT_ONCE else await asyncio.to_thread(document)
    await exchange.send(200, [JSON], body)


async def answer_rerank(service: Service, exchange: Exchange, request: RerankRequest) -> None:
    """Respond with the documents that answer the query best."""
    model = service.pool.model(request.model)
    texts = request.passages
    with client_of(service, exchange, model) as client:
        reranked = await client.rerank_counted(
            request.query, texts, instruction=request.instruction, **request.options(exchange.caller, model)
        )
    exchange.facts |= {"texts": len(texts), "tokens": reranked.tokens}
    if request.texts is not None:
        ranked: list[dict[str, object]] = []
        for each in reranked.ranked[: request.top_n]:
            document = {"text": texts[each.index]} if request.return_text else {}
            ranked.append({"index": each.index, "score": each.score, **document})
        await exchange.send_json(ranked)
        return
    version = "2" if exchange.scope["path"].startswith("/v2") else "1"
    results: list[dict[str, object]] = []
    for each in reranked.ranked[: request.top_n]:
        result: dict[str, object] = {"index": each.index, "relevance_score": each.score}
        if request.return_documents:
            result["document"] = {"text": texts[each.index]}
        results.append(result)
    await exchange.send_json(
        {
            "id": f"rerank-{secrets.token_hex(16)}",
            "model": request.model or model.card.name,
            "results": results,
            "usage": {"prompt_tokens": reranked.tokens, "total_tokens": reranked.tokens},
            "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        }
    )


_RERANK = "Put documents in the order in which they answer a query"

ENDPOINTS = (
    post("/v1/embeddings", EMBEDDING_BODY, answer_embeddings, "Turn texts into vectors"),
    post("/embed", TEI_EMBED_BODY, answer_tei, "Turn texts into vectors, as text-embeddings-inference does"),
    *(post(path, RERANK_BODY, answer_rerank, _RERANK) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
)
