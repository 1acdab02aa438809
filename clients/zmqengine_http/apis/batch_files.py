"""OpenAI's files and batches: many requests in one file, answered behind all others, with the results in another."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from zmqengine_http.apis import chat_completions, completions, embeddings
from zmqengine_http.batches.job import (
    ENDED,
    WINDOW_S,
    BatchJob,
    Counts,
    LineErrors,
    faults,
)
from zmqengine_http.batches.runner import Batches, cancel_mark, read
from zmqengine_http.batches.stored_files import Storage, lines_of, new_id, uploaded
from zmqengine_http.endpoint import Endpoint, Service, delete, get, post
from zmqengine_http.serving.body import Body
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.serving.exchange import Exchange

_OF_LINES = tuple(api.ENDPOINTS[0].path for api in (chat_completions, completions, embeddings))
"""The paths that lines may name: their requests have a priority."""
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_OCTETS = (b"content-type", b"application/octet-stream")


class BatchRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = None


def _check(request: BatchRequest) -> None:
    if request.endpoint not in _OF_LINES:
        raise bad_field("endpoint", f"one of {', '.join(_OF_LINES)}", code="unsupported_value")


BATCH_BODY = Body(BatchRequest, check=_check)


async def upload(service: Service, exchange: Exchange) -> None:
    """POST /v1/files."""
    body = await exchange.read_body(service.config.body_bytes_max, service.bodies)
    form = await asyncio.to_thread(uploaded, exchange.header(b"content-type") or "", body)
    await exchange.send_json(_storage(service, exchange).add(form))


async def list_files(service: Service, exchange: Exchange) -> None:
    """GET /v1/files."""
    await exchange.send_json(_listed(_storage(service, exchange).all()))


async def get_file(service: Service, exchange: Exchange) -> None:
    """GET /v1/files/{id}."""
    await exchange.send_json(_storage(service, exchange).find(_id(exchange)))


async def file_content(service: Service, exchange: Exchange) -> None:
    """GET /v1/files/{id}/content."""
    storage, id_ = _storage(service, exchange), _id(exchange)
    storage.find(id_)
    await exchange.send(200, [_OCTETS], await asyncio.to_thread(storage.path(id_).read_bytes))


async def delete_file(service: Service, exchange: Exchange) -> None:
    """DELETE /v1/files/{id}. Raises a 400 for the input of a batch that runs."""
    id_ = _id(exchange)
    using = [
        batch.id
        for batch in _batches(service).all(exchange.caller)
        if batch.status not in ENDED and batch.input_file_id == id_
    ]
    if using:
        raise bad_field("id", f"{using[0]} reads it: cancel that first")
    _storage(service, exchange).delete(id_)
    await exchange.send_json({"id": id_, "object": "file", "deleted": True})


async def create_batch(service: Service, exchange: Exchange, request: BatchRequest) -> None:
    """POST /v1/batches: check every line, then run them behind all other requests."""
    storage = _storage(service, exchange)
    storage.find(request.input_file_id)
    lines = lines_of(storage.path(request.input_file_id))
    count, wrong = await asyncio.to_thread(faults, lines, request.endpoint)
    now = int(time.time())
    batch = BatchJob(
        id=new_id("batch_"), endpoint=request.endpoint, input_file_id=request.input_file_id, created_at=now,
        metadata=request.metadata, request_counts=Counts(total=count), in_progress_at=now,
        expires_at=now + WINDOW_S,
    )  # fmt: skip
    if wrong:
        batch.status, batch.failed_at, batch.errors = "failed", now, LineErrors(wrong)
    _batches(service).start(exchange.caller, batch)
    await exchange.send_json(batch)


async def list_batches(service: Service, exchange: Exchange) -> None:
    """GET /v1/batches."""
    await exchange.send_json(_listed(_batches(service).all(exchange.caller)))


async def get_batch(service: Service, exchange: Exchange) -> None:
    """GET /v1/batches/{id}."""
    await exchange.send_json(_found(service, exchange))


async def cancel_batch(service: Service, exchange: Exchange) -> None:
    """POST /v1/batches/{id}/cancel: begin no further line; the results so far stay."""
    batch = _found(service, exchange)
    if batch.status not in ENDED:
        _batches(service).cancel(exchange.caller, batch.id)
        batch.status = "cancelling"
    await exchange.send_json(batch)


def _found(service: Service, exchange: Exchange) -> BatchJob:
    """The caller's batch that the path names. Raises a 404."""
    id_ = _id(exchange)
    path = _batches(service).path(exchange.caller, id_)
    if _BATCH_ID.fullmatch(id_) is None or not path.exists():
        raise ApiError(404, f"No batch found with id {id_[:100]!r}", param="id", code="not_found")
    batch = read(path)
    if batch.status not in ENDED and cancel_mark(path).exists():
        batch.status = "cancelling"
    return batch


def _batches(service: Service) -> Batches:
    assert service.batches is not None
    return service.batches


def _storage(service: Service, exchange: Exchange) -> Storage:
    return Storage(_batches(service).root, exchange.caller)


def _id(exchange: Exchange) -> str:
    return str(exchange.scope["path_params"]["id"])


def _listed(stored: Sequence[object]) -> dict[str, object]:
    plain = [msgspec.to_builtins(each) for each in stored]
    ids = [each["id"] for each in plain]
    return {
        "object": "list", "data": plain, "has_more": False,
        "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
    }  # fmt: skip


ENDPOINTS = (
    Endpoint("/v1/files", "POST", upload, "Keep a file of requests for a batch"),
    get("/v1/files", list_files, "The files of this key"),
    get("/v1/files/{id}", get_file, "One file"),
    delete("/v1/files/{id}", delete_file, "Delete a file"),
    get("/v1/files/{id}/content", file_content, "The content of a file"),
    post("/v1/batches", BATCH_BODY, create_batch, "Answer a file of requests behind all others"),
    get("/v1/batches", list_batches, "The batches of this key"),
    get("/v1/batches/{id}", get_batch, "One batch"),
    Endpoint("/v1/batches/{id}/cancel", "POST", cancel_batch, "Begin no further line of a batch"),
)
