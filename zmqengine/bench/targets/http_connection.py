"""An HTTP/1.1 connection with little overhead of its own.

While a stream runs, received bytes are only timestamped, and httptools' C parser finds the end of the message; events
and JSON are parsed after the measurement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from zmqengine.bench.targets.records import RequestRecord
from zmqengine.bench.targets.sse import CountTokens, answer_of_body, answer_of_stream

Clock = Callable[[], float]


class HttpOutcome:
    """A response as received: status, and pieces of the body with their times."""

    def __init__(self, started_s: float, *, stream: bool) -> None:
        self.started_s = started_s
        self.ended_s = started_s
        self.status = 0
        self.body: list[tuple[float, bytes]] = []
        self.error = ""
        self.cancelled = False
        self._stream = stream

    def record(self, count_tokens: CountTokens | None = None) -> RequestRecord:
        """The record of the events in the body."""
        error = self.error
        if self.status not in (0, 200):
            text = b"".join(data for _, data in self.body)[:200].decode(errors="replace")
            return RequestRecord(
                started_s=self.started_s, ended_s=self.ended_s, error=f"http {self.status}: {text}"
            )
        answer = answer_of_stream(self.body) if self._stream else answer_of_body(self.body)
        return answer.record(
            self.started_s, self.ended_s, error=error, cancelled=self.cancelled, count_tokens=count_tokens
        )


class HttpConnection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._outcome: HttpOutcome | None = None
        self._on_chunk: Callable[[int], None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._now_s = 0.0
        self._until_close = False
        self.reusable = False

    def exchange(
        self, outcome: HttpOutcome, request: bytes, on_chunk: Callable[[int], None]
    ) -> asyncio.Future[None]:
        """Send the bytes of a request; the future is done when its response has ended or failed."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._outcome, self._on_chunk = outcome, on_chunk
        self._until_close = self.reusable = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._ended

    def close(self) -> None:
        """Close at once, and drop a running request."""
        self._outcome = None
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.reusable = True

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._now_s = self._clock()
        self.reusable = False
        whole = self._until_close and exc is None
        self._end("" if whole else f"connection closed by the server: {exc or 'before the end'}")

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_message_begin(self) -> None:
        # HTTP/1.0 without a length: the body ends with the connection.
        self._until_close = True

    def on_headers_complete(self) -> None:
        if self._outcome is not None and self._parser is not None:
            self._outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._outcome is None:
            return
        self._outcome.body.append((self._now_s, body))
        if self._on_chunk is not None and b"data:" in body:
            self._on_chunk(body.count(b"data:"))

    def on_message_complete(self) -> None:
        self.reusable = self._parser is not None and self._parser.should_keep_alive()
        self._end("")

    def _end(self, error: str) -> None:
        outcome, ended = self._outcome, self._ended
        self._outcome = None
        if outcome is None or ended is None:
            return
        outcome.ended_s = self._now_s
        outcome.error = outcome.error or error
        if not ended.done():
            ended.set_result(None)
