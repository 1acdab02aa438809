"""An OpenAI-compatible server as a target, through a client that costs little beside what it measures.

While a stream runs, the client only stamps the time on the bytes as they come and lets the C parser of httptools
find the end of the message; events and JSON are read after the clock has stopped. A connection is kept for the
next request if the server allows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from zmqengine.bench.records import RequestRecord, RequestSpec
from zmqengine.bench.sse import CountTokens, answer_of_body, answer_of_stream
from zmqengine.bench.targets import TargetError, TargetSpec

Clock = Callable[[], float]

CONNECT_TIMEOUT_S = 30.0


class HttpOutcome:
    """A response as it was read: status, and pieces of body with their times."""

    def __init__(self, started_s: float, *, stream: bool) -> None:
        self.started_s = started_s
        self.ended_s = started_s
        self.status = 0
        self.body: list[tuple[float, bytes]] = []
        self.error = ""
        self.cancelled = False
        self._stream = stream

    def record(self, count_tokens: CountTokens | None = None) -> RequestRecord:
        """What the events in the body add up to."""
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
    """One connection: at most one request at a time."""

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
        """Send the bytes of a request; the future is done when its answer has ended, well or badly."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._outcome, self._on_chunk = outcome, on_chunk
        self._until_close = self.reusable = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._ended

    def close(self) -> None:
        """Close at once, and forget what runs."""
        self._outcome = None
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

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


class HttpStream:
    """A request on a connection of its own."""

    def __init__(self, session: HttpSession, request: RequestSpec) -> None:
        self._session = session
        self._outcome = HttpOutcome(session.clock(), stream=request.stream)
        self._chunks = 0
        self._wanted = 0
        self._reached = asyncio.Event()
        self._left = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(request))

    async def wait_chunks(self, chunks: int) -> bool:
        """Wait for so many events of the stream."""
        if self._chunks < chunks and not self._task.done():
            self._wanted = chunks
            self._reached.clear()
            await self._reached.wait()
        return self._chunks >= chunks

    def cancel(self) -> None:
        """Close the connection under the request."""
        if not self._task.done():
            self._left.set()

    async def outcome(self) -> HttpOutcome:
        """Wait for the end of the response."""
        return await asyncio.shield(self._task)

    def _on_chunk(self, chunks: int) -> None:
        self._chunks += chunks
        if self._wanted and self._chunks >= self._wanted:
            self._wanted = 0
            self._reached.set()

    async def _run(self, request: RequestSpec) -> HttpOutcome:
        outcome = self._outcome
        left = asyncio.ensure_future(self._left.wait())
        connection: HttpConnection | None = None
        try:
            connection = await asyncio.wait_for(self._session.connection(), CONNECT_TIMEOUT_S)
            ended = connection.exchange(outcome, self._session.encode(request), self._on_chunk)
            futures: set[asyncio.Future[Any]] = {ended, left}
            await asyncio.wait(futures, timeout=self._session.timeout_s, return_when="FIRST_COMPLETED")
            if not ended.done():
                outcome.cancelled = self._left.is_set()
                if not outcome.cancelled:
                    outcome.error = f"no end within {self._session.timeout_s:g} s"
                outcome.ended_s = self._session.clock()
        except (OSError, asyncio.TimeoutError) as error:
            outcome.error = f"cannot connect: {error or type(error).__name__}"
            outcome.ended_s = self._session.clock()
        finally:
            left.cancel()
            if connection is not None:
                self._session.give_back(connection)
            self._reached.set()
        return outcome


class HttpSession:
    """Connections to one server, made as they are needed."""

    def __init__(self, spec: TargetSpec, *, timeout_s: float, clock: Clock = time.perf_counter) -> None:
        url = urlsplit(spec.address)
        if url.scheme != "http" or not url.hostname:
            raise TargetError(f"{spec.address}: give a URL like http://127.0.0.1:8080/v1")
        self.clock = clock
        self.timeout_s = timeout_s
        self._spec = spec
        self._host, self._port = url.hostname, url.port or 80
        path = url.path.rstrip("/") or "/v1"
        self._path = f"{path}/{'chat/completions' if spec.api == 'chat' else 'completions'}"
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._streams: set[asyncio.Task[HttpOutcome]] = set()

    def send(self, request: RequestSpec) -> HttpStream:
        """Start a request on an idle connection or a new one."""
        return HttpStream(self, request)

    async def close(self) -> None:
        """Close every connection."""
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def connection(self) -> HttpConnection:
        """An idle connection, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: HttpConnection(self.clock), self._host, self._port)
        self._all.add(made)
        return made

    def give_back(self, connection: HttpConnection) -> None:
        """Keep it if its answer was read to the end and the server allows it; otherwise close it."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)

    def encode(self, request: RequestSpec) -> bytes:
        """The bytes of the request."""
        body: dict[str, object] = {
            "model": self._spec.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": request.stream,
            **self._spec.extra_body,
        }
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        if self._spec.api == "chat":
            body["messages"] = [{"role": "user", "content": request.text}]
        else:
            body["prompt"] = request.text
        content = msgspec.json.encode(body)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content
