"""Server-sent events of several choices, written to one response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqengine_http.exchange import Exchange

EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # For nginx: pass each event on at once.
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": keepalive\n\n"
"""A keep-alive that every reader of server-sent events skips."""


class EventStream:
    """Writes events of several choices to one response, without one waiting for another's turn.

    The response starts with the first event. What comes while a write waits for the client goes out with the next
    one. After `keepalive_s` of silence `keepalive()` is written.
    """

    def __init__(self, exchange: Exchange, keepalive_s: float, keepalive: Callable[[], bytes]) -> None:
        self._exchange = exchange
        self._waiting: list[bytes] = []
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._keep_alive)
        self._beat: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Send events; returns when they are on their way, or will go with those being sent."""
        if self._writing:
            self._waiting.append(data)
            return
        self._writing = True
        try:
            while data:
                if not self._exchange.started:
                    await self._exchange.start(200, EVENT_STREAM)
                self._written_at = self._loop.time()
                await self._exchange.write(data)
                data, self._waiting = b"".join(self._waiting), []
        finally:
            self._writing = False

    async def finish(self, data: bytes) -> None:
        """The last events. Nothing else is being written any more, but for a keep-alive."""
        self.close()
        if self._beat is not None:
            await self._beat
        if not self._exchange.started:
            await self._exchange.start(200, EVENT_STREAM)
        await self._exchange.write(data, last=True)

    def close(self) -> None:
        """No more keep-alives."""
        self._timer.cancel()

    def _keep_alive(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._keepalive_s:
            self._beat = self._loop.create_task(self.write(self._keepalive()))
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._keep_alive)
