"""Bound on unread long replies, in bytes: a command of 60 bytes may request megabytes."""

from __future__ import annotations

from collections import deque

import zmq

TRACKED_BYTES_MIN = 16_384
"""Shorter replies are bounded by their number."""


class UnreadReplies:
    """Sends replies of a ROUTER, and counts the bytes of long ones that libzmq still holds for each connection.

    A long reply's frame is passed without a copy. Unread replies of an ended connection no longer count.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], *, bytes_max: int, all_bytes_max: int | None = None
    ) -> None:
        self._socket = socket
        self._bytes_max = bytes_max
        self._all_bytes_max = all_bytes_max
        self._waiting: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}

    def has_room(self, route: bytes, size: int = 0) -> bool:
        """Whether another long reply, of `size` bytes, may be sent to this connection."""
        if not self._waiting:
            return True
        held = {other: self._held(other) for other in list(self._waiting)}
        # The first is always allowed, or a reply over the bound could never be sent.
        mine, total = held.get(route, 0), sum(held.values())
        if mine and mine + size > self._bytes_max:
            return False
        return self._all_bytes_max is None or not total or total + size <= self._all_bytes_max

    def send(self, route: bytes, header: bytes, body: bytes) -> bool:
        """Send a reply; returns whether libzmq took it: not if the front-end is gone or reads nothing."""
        try:
            if len(body) < TRACKED_BYTES_MIN:
                self._socket.send_multipart([route, header, body], zmq.DONTWAIT)
                return True
            self._socket.send_multipart([route, header], zmq.DONTWAIT | zmq.SNDMORE)
            tracker = self._socket.send(body, zmq.DONTWAIT, copy=False, track=True)
        except zmq.ZMQError:
            return False
        self._waiting.setdefault(route, deque()).append((tracker, len(body)))
        return True

    def _held(self, route: bytes) -> int:
        waiting = self._waiting[route]
        while waiting and waiting[0][0].done:
            waiting.popleft()
        if not waiting:
            del self._waiting[route]
        return sum(size for _, size in waiting)
