"""Ends connections that send nothing but nonsense, whatever they say: a refusal costs us more than it costs them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import zmq

log = logging.getLogger("zmqengine.worker")

WINDOW_S = 10.0


class AbuseLimiter:
    """Counts what each connection got wrong of late, and ends one that goes on with it.

    libzmq cannot end a single connection, but it names the descriptor that a message came from: shut down, that one
    connection is over for both sides. A descriptor may have passed to another connection since the message was sent;
    where the system tells the process behind it (ipc on Linux), that one is spared, and elsewhere it connects again.
    """

    def __init__(self, strikes_max: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._strikes_max = strikes_max
        self._clock = clock
        self._until_s = 0.0
        self._strikes: dict[tuple[int, str], int] = {}
        self.ended = 0

    def strike(self, frame: zmq.Frame, *, strikes: int = 1) -> bool:
        """The sender of this frame got something wrong; says whether its connection was ended for it."""
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
        """End the connection that this frame came from; says whether there was one."""
        who = _sender(frame)
        if who is None or not _shut_down(*who):
            return False
        self.ended += 1
        log.warning("connection ended: it sent nonsense", extra={"peer": who[1]})
        return True


def _sender(frame: zmq.Frame) -> tuple[int, str] | None:
    """The descriptor and address of the peer; None where libzmq does not tell."""
    try:
        # "Peer-Address" is the ip address, or "localhost:uid:gid:pid" on ipc.
        return int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return None


def _shut_down(fd: int, address: str) -> bool:
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    with contextlib.suppress(OSError), socket.socket(fileno=copy) as connection:
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
