"""An endpoint as data. Routing, reading and checking its body, the shape of its refusals and its part of the OpenAPI
document all derive from one `Endpoint`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from zmqengine_http.service import Service
from zmqengine_http.serving.body import Body
from zmqengine_http.serving.errors import ErrorShape
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.serving.openai_error_shape import openai_error

RequestT = TypeVar("RequestT", bound=Struct)
Handler = Callable[[Service, Exchange], Awaitable[None]]


class Endpoint(NamedTuple):
    """A path and what answers it; made by `get` and `post`.

    `open`: no key is asked for. `streams`: the answer may be server-sent events. `error_shape` makes the bodies of
    refusals. Without a `method` any is taken.
    """

    path: str
    method: str
    handler: Handler
    summary: str
    body: Body[Any] | None = None
    open: bool = False
    streams: bool = False
    error_shape: ErrorShape = openai_error


def get(
    path: str, handler: Handler, summary: str, *, open: bool = False, error_shape: ErrorShape = openai_error
) -> Endpoint:
    """An endpoint for GET and HEAD."""
    return Endpoint(path, "GET", handler, summary, open=open, error_shape=error_shape)


def post(
    path: str,
    body: Body[RequestT],
    answer: Callable[[Service, Exchange, RequestT], Coroutine[Any, Any, None]],
    summary: str,
    *,
    streams: bool = False,
    error_shape: ErrorShape = openai_error,
) -> Endpoint:
    """An endpoint for POST: the body is read and checked, then `answer` runs until it is done or the client left."""

    async def handler(service: Service, exchange: Exchange) -> None:
        data = await exchange.read_body(service.config.body_bytes_max)
        read = body.read(data, ignore_unknown=service.config.unknown_fields == "ignore")
        del data
        exchange.note_ignored(read.ignored, read.unknown_inside)
        await exchange.unless_gone(answer(service, exchange, read.request))
        # Answers of requests that came together end together. The books are closed behind the last of them: one kind
        # of work after the other takes half the time of both in turn.
        await asyncio.sleep(0)

    return Endpoint(path, "POST", handler, summary, body, streams=streams, error_shape=error_shape)
