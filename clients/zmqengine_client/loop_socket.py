"""A ZeroMQ socket on an asyncio event loop; sends never wait, and raise at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

ROUND_MESSAGES_MAX = 256
_POLLIN = int(zmq.POLLIN)


class LoopSocket:
    """Calls `receive` with the frames of each message, on the running loop.

    ZeroMQ's descriptors are edge-triggered: they signal an event once, and a send may take it. So the socket is read
    until it is empty after every wake-up and after every send.
    """

    def __init__(self, kind: int, receive: Callable[[list[bytes]], None]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._loop.add_reader(int(self.socket.getsockopt(zmq.FD)), self._pump)
        self._pump_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises `zmq.ZMQError` where it cannot be queued: no such route, or no room."""
        self._pump_soon()
        self.socket.send_multipart(frames, zmq.DONTWAIT)

    def close(self, linger_ms: int) -> None:
        """Close it; waits at most `linger_ms` for unsent messages. Idempotent."""
        if not self.socket.closed:
            self._loop.remove_reader(int(self.socket.getsockopt(zmq.FD)))
            self.socket.close(linger_ms)
            self._context.term()

    def _pump_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._due = False
        for _ in range(ROUND_MESSAGES_MAX):
            if self.socket.closed or not int(self.socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            self._receive(self.socket.recv_multipart(zmq.DONTWAIT))
        self._pump_soon()
