"""Ends connections that keep sending invalid messages: a refusal costs the worker more than the sender."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable

import zmq

from zmqengine.worker.wire.descriptors import socket_at

log = logging.getLogger("zmqengine.worker")

WINDOW_S = 10.0
"""Seconds after which strikes are forgotten."""


class AbuseLimiter:
    """Counts recent invalid messages of each connection, and ends a connection beyond a bound.

    libzmq cannot end a single connection, but it names the descriptor of a message's sender: a shutdown of it ends that
    connection for both sides. The descriptor may belong to another connection by now; where the system knows the peer's
    process (ipc on Linux), that one is spared, elsewhere it reconnects.
    """

    def __init__(self, strikes_max: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._strikes_max = strikes_max
        self._clock = clock
        self._until_s = 0.0
        self._strikes: dict[tuple[int, str], int] = {}
        self.ended = 0

    def strike(self, frame: zmq.Frame, *, strikes: int = 1) -> bool:
        """Count an invalid message of this frame's sender; returns whether its connection was ended."""
        who = _sender(frame)
        if who is None:
            return False
        now_s = self._clock()
        if now_s >= self._until_s:
            self._until_s = now_s + WINDOW_S
            self._strikes.clear()
        count = self._strikes[who] = self._strikes.get(who, 0) + strikes
        if count < self._strikes_max:
            return False
        del self._strikes[who]
        return self.end(frame)

    def end(self, frame: zmq.Frame) -> bool:
        """End the connection of this frame's sender; returns whether there was one."""
        who = _sender(frame)
        if who is None or not _shut_down(*who):
            return False
        self.ended += 1
        log.warning("connection ended: it kept sending invalid messages", extra={"peer": who[1]})
        return True


def _sender(frame: zmq.Frame) -> tuple[int, str] | None:
    """The descriptor and address of the peer; None where libzmq does not know them."""
    try:
        # "Peer-Address" is the ip address, or "localhost:uid:gid:pid" on ipc.
        return int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return None


def _shut_down(fd: int, address: str) -> bool:
    with contextlib.suppress(OSError), socket_at(fd) as connection:
        if _is_of(connection, address):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _is_of(connection: socket.socket, address: str) -> bool:
    if connection.family != socket.AF_UNIX or sys.platform != "linux":
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", credentials)
    return address.endswith(f":{uid}:{gid}:{pid}")
