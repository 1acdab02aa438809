"""Ends connections on out that go on with refused topics: libzmq keeps these until the connection ends."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
from collections import Counter

import zmq

from zmqengine.worker.wire.descriptors import socket_at

log = logging.getLogger("zmqengine.worker")

REFUSED_MAX = 64
"""A well-behaved front-end may have a few: topics of an earlier worker, or of a session that was taken over."""
CONNECTIONS_MAX = 4096
"""Connections whose topics are counted; then the count begins again."""


class RefusedTopics:
    """Counts the refused topics of each connection.

    libzmq cannot end a single connection, but it names the descriptor of a message's sender: a shutdown of it ends that
    connection for both sides. The descriptor may belong to another connection by now; where the system knows the peer's
    process (ipc on Linux), that one is spared, elsewhere it reconnects.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str]] = Counter()

    def count(self, frame: zmq.Frame) -> None:
        """Count one more of this frame's sender, and end its connection after the last that it may have."""
        sender = _sender(frame)
        if sender is None:
            return
        if len(self._counts) >= CONNECTIONS_MAX:
            self._counts.clear()
        self._counts[sender] += 1
        if self._counts[sender] >= REFUSED_MAX:
            del self._counts[sender]
            self.end(frame)

    def end(self, frame: zmq.Frame) -> bool:
        """End the connection of this frame's sender; returns whether there was one."""
        sender = _sender(frame)
        if sender is None or not _shut_down(*sender):
            return False
        log.warning(
            "connection ended: it goes on with what is no valid subscription", extra={"peer": sender[1]}
        )
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
