"""The part of a stream that both halves share: everything but waiting."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from zmqengine.errors import ZmqEngineError
from zmqengine_client.core.chunks import Completion, PromptProgress
from zmqengine_client.core.request import Request

ChunkT_co = TypeVar("ChunkT_co", covariant=True)
ChunkT = TypeVar("ChunkT")


class ChunkReader(Protocol[ChunkT_co]):
    """`TokenReader` or `TextReader`."""

    request: Request

    def take(self) -> ChunkT_co | None: ...

    @property
    def finished(self) -> bool: ...

    @property
    def wants_abort(self) -> bool: ...

    def completion(self) -> Completion: ...

    def failure(self) -> ZmqEngineError | None: ...


class Owner(Protocol):
    """The client behind a stream."""

    def abort(self, request: Request) -> None: ...

    def check(self) -> None: ...


class StreamState(Generic[ChunkT]):
    """The part of `Stream` and `AsyncStream` that never waits."""

    def __init__(self, reader: ChunkReader[ChunkT], owner: Owner) -> None:
        self._reader = reader
        # Keeps the client alive while its stream is read.
        self._owner = owner
        self._closed = False

    def __del__(self) -> None:
        self.close()

    @property
    def request_id(self) -> str:
        """The request id, as in the worker's log."""
        return self._reader.request.id

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of prefill; None before the first report."""
        return self._reader.request.progress

    @property
    def ended(self) -> bool:
        """Whether all of the output has been read."""
        return self._closed or self._reader.finished

    @property
    def result(self) -> Completion:
        """The outcome, after the end. Raises the stream's error, or RuntimeError before the end."""
        if not self.ended:
            raise RuntimeError("the stream has not ended: read it to its end first, or call read()")
        self._raise_failure()
        return self._reader.completion()

    def abort(self) -> None:
        """Stop generating. Received output can still be read; the stream then ends with `abort`."""
        if not self._reader.request.ended:
            self._owner.abort(self._reader.request)

    def close(self) -> None:
        """Abort if it has not ended, and drop unread output. Idempotent."""
        if not self.ended:
            self._closed = True
            self.abort()

    def _take(self) -> ChunkT | None:
        chunk = self._reader.take()
        if self._reader.wants_abort:
            self.abort()
        return chunk

    def _raise_failure(self) -> None:
        error = self._reader.failure()
        if error is not None:
            error.completion = self._reader.completion()
            # Frames inside the client tell the caller nothing.
            raise error.with_traceback(None)
