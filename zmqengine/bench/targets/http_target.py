"""An OpenAI-compatible server as a target, with keep-alive connections if the server allows them."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from zmqengine.bench.targets.http_connection import Clock, HttpConnection, HttpOutcome
from zmqengine.bench.targets.records import RequestSpec
from zmqengine.bench.targets.target import TargetError, TargetSpec

CONNECT_TIMEOUT_S = 30.0


class HttpStream:
    """A request on its own connection."""

    def __init__(self, session: HttpSession, request: RequestSpec) -> None:
        self._session = session
        self._outcome = HttpOutcome(session.clock(), stream=request.stream)
        self._chunks = 0
        self._wanted = 0
        self._reached = asyncio.Event()
        self._left = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(request))

    @property
    def chunks(self) -> int:
        """The number of received events."""
        return self._chunks

    async def wait_chunks(self, chunks: int) -> bool:
        """Wait for this number of events."""
        if self._chunks < chunks and not self._task.done():
            self._wanted = chunks
            self._reached.clear()
            await self._reached.wait()
        return self._chunks >= chunks

    def cancel(self) -> None:
        """Close the connection of the request."""
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
    """Connections to one server, made on demand, or in advance by `connect`."""

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

    async def connect(self, connections: int) -> None:
        """Open connections in advance. Failures are left to the requests that find none."""
        made = (asyncio.wait_for(self._connect(), CONNECT_TIMEOUT_S) for _ in range(connections))
        for connection in await asyncio.gather(*made, return_exceptions=True):
            if isinstance(connection, HttpConnection):
                self._idle.append(connection)

    async def close(self) -> None:
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
        return await self._connect()

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: HttpConnection(self.clock), self._host, self._port)
        self._all.add(made)
        return made

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection whose response was read to the end, if the server allows it; otherwise close it."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)

    def encode(self, request: RequestSpec) -> bytes:
        body: dict[str, object] = {
            "model": self._spec.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": request.stream,
        }
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        if request.top_p < 1:
            body["top_p"] = request.top_p
        if request.constraint is not None:
            schema = msgspec.json.decode(request.constraint.text)
            named = {"name": "answer", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
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
