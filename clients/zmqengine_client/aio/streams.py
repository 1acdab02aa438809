"""Streams of the asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from zmqengine.errors import ZmqEngineError
from zmqengine_client.aio.waiting import AsyncNotifier
from zmqengine_client.core.chunks import Completion, TextChunk, TokenChunk
from zmqengine_client.core.constrained import to_object
from zmqengine_client.core.stream_state import ChunkReader, Owner, StreamState

if TYPE_CHECKING:
    from typing_extensions import Self

ChunkT = TypeVar("ChunkT")
ObjectT = TypeVar("ObjectT")


class AsyncStream(StreamState[ChunkT]):
    """The output of one request, chunk by chunk, for one task.

    `async for chunk in stream` aborts the request when it is left early; so do `close()`, the end of its `with` block
    and losing the last reference. `anext(stream)` does not. An end by error, deadline, lease, slow_consumer or
    shutdown raises its error, with the partial output as `error.completion`; so does a rejected request.
    """

    def __init__(self, reader: ChunkReader[ChunkT], notifier: AsyncNotifier, owner: Owner) -> None:
        super().__init__(reader, owner)
        self._notifier = notifier

    def __aiter__(self) -> AsyncIterator[ChunkT]:
        return _LeavingAborts(self)

    async def __anext__(self) -> ChunkT:
        while not self._closed:
            chunk = self._take()
            if chunk is not None:
                return chunk
            if self._reader.finished:
                self._raise_failure()
                break
            self._owner.check()
            await self._notifier.mailbox.wait()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def read(self) -> Completion:
        """Read to the end and return the outcome."""
        try:
            async for _ in self:
                pass
        except ZmqEngineError as error:
            raise error.with_traceback(None) from None
        return self.result


class AsyncTokenStream(AsyncStream[TokenChunk]):
    """A stream of `TokenChunk`."""


class AsyncTextStream(AsyncStream[TextChunk]):
    """A stream of `TextChunk`. Stop strings and end tokens are never in the text."""

    async def text(self) -> str:
        """Read to the end and return the whole text."""
        return (await self.read()).text

    @overload
    async def read_object(self) -> Any: ...

    @overload
    async def read_object(self, kind: type[ObjectT]) -> ObjectT: ...

    async def read_object(self, kind: Any = None) -> Any:
        """Read to the end and return the output, decoded as `kind`, or without one as the type given as `schema`.

        With a plain JSON schema these are dicts and lists. Raises `GenerationFailed` if the output was cut, for example
        by `max_tokens`, and the type's own error if it demands more than its schema.
        """
        completion = await self.read()
        return to_object(completion, self._reader.request.options.shape if kind is None else kind)


class _LeavingAborts(Generic[ChunkT]):
    """The iterator of a loop: collected when the loop is left, which aborts the request."""

    def __init__(self, stream: AsyncStream[ChunkT]) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[ChunkT]:
        return self

    async def __anext__(self) -> ChunkT:
        try:
            return await self._stream.__anext__()
        except ZmqEngineError as error:
            self._stream.close()
            # The caller's own lines are what the caller looks for, not ours.
            raise error.with_traceback(None) from None
        except BaseException:
            # Its traceback keeps this iterator from being collected, as long as a task or a handler has the exception.
            self._stream.close()
            raise

    def __del__(self) -> None:
        self._stream.close()
