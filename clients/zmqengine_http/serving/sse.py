"""Server-sent events of several choices, written to one response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqengine_http.serving.exchange import Exchange

EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # For nginx: pass each event on at once.
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": keepalive\n\n"
"""A keep-alive that every reader of server-sent events skips."""


WAITING_BYTES_MAX = 64 * 1024
"""What may wait behind a write that waits for the client; the choices then wait too."""


class EventStream:
    """Writes events of several choices to one response, without one waiting for another's turn.

    The response starts with the first event. What comes while a write waits for the client goes out with the next
    one, up to a bound. After `keepalive_s` of silence `keepalive()` is written. A client of HTTP/1.0, which cannot read
    a body of unknown length in pieces, gets all of it at the end.
    """

    def __init__(self, exchange: Exchange, keepalive_s: float, keepalive: Callable[[], bytes]) -> None:
        self._exchange = exchange
        self._in_one_piece = exchange.scope["http_version"] == "1.0"
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._writing = False
        self._written = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._keep_alive)
        self._beat: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the client has got an event, or is about to."""
        return self._exchange.started or (bool(self._waiting) and not self._in_one_piece)

    async def write(self, data: bytes, *, more: bool = False) -> None:
        """Send events; returns when they are on their way, or will go with those being sent.

        With `more` they go with the next ones, which are about to be written: one piece of the body instead of two.
        """
        if self._in_one_piece or more or self._writing:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._writing:
                while self._waiting_bytes > WAITING_BYTES_MAX:
                    self._written.clear()
                    await self._written.wait()
            return
        if self._waiting:
            data = self._take_waiting(data)
        self._writing = True
        try:
            while data:
                if not self._exchange.started:
                    await self._exchange.start(200, EVENT_STREAM)
                self._written_at = self._loop.time()
                await self._exchange.write(data)
                if not self._waiting:
                    break
                data = self._take_waiting()
                self._written.set()
        finally:
            self._writing = False

    async def finish(self, data: bytes) -> None:
        """The last events. Nothing else is being written any more, but for a keep-alive."""
        self.close()
        if self._beat is not None:
            await self._beat
        data = self._take_waiting(data)
        if self._in_one_piece:
            await self._exchange.send(200, EVENT_STREAM, data)
            return
        if not self._exchange.started:
            await self._exchange.start(200, EVENT_STREAM)
        await self._exchange.write(data, last=True)

    def close(self) -> None:
        """No more keep-alives."""
        self._timer.cancel()

    def _take_waiting(self, data: bytes = b"") -> bytes:
        """What waits, and `data` behind it."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return b"".join((*taken, data))

    def _keep_alive(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._keepalive_s:
            self._beat = self._loop.create_task(self.write(self._keepalive()))
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._keep_alive)
