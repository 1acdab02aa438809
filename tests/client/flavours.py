"""The synchronous client behind the asynchronous one's methods, so that one test speaks to both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from zmqengine_client import AsyncClient, Client, TextStream
from zmqengine_client.sync.streams import Stream

AWAITED = {"ask", "describe", "status", "metrics", "drain", "ping", "tokenizer", "wait_ready", "close"}
_END = object()


class ClientInThreads:
    """A `Client` whose waiting methods run in threads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = Client(*args, **options)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.client, name)
        if name in AWAITED:
            return lambda *args, **options: asyncio.to_thread(member, *args, **options)
        if name in ("generate", "generate_tokens", "chat"):
            return lambda *args, **options: StreamInThreads(member(*args, **options))
        return member

    async def __aenter__(self) -> ClientInThreads:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.close)

    async def select(self, streams: list[StreamInThreads]) -> AsyncIterator[tuple[StreamInThreads, Any]]:
        """As `AsyncClient.select`."""
        wrapped = {stream.stream: stream for stream in streams}
        iterator = self.client.select(cast("list[TextStream]", list(wrapped)))
        while (item := await asyncio.to_thread(next, iterator, _END)) is not _END:
            assert isinstance(item, tuple)
            yield wrapped[item[0]], item[1]


class StreamInThreads:
    """A `Stream` whose waiting methods run in threads."""

    def __init__(self, stream: Stream[Any]) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.stream, name)
        return (lambda: asyncio.to_thread(member)) if name in ("read", "text") else member

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Iterator(iter(self.stream))

    async def __anext__(self) -> Any:
        item = await asyncio.to_thread(next, self.stream, _END)
        if item is _END:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> StreamInThreads:
        self.stream.__enter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.stream.__exit__(*error)


class _Iterator:
    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await asyncio.to_thread(next, self.iterator, _END)
        if item is _END:
            raise StopAsyncIteration
        return item


FLAVOURS: dict[str, Any] = {"sync": ClientInThreads, "async": AsyncClient}
