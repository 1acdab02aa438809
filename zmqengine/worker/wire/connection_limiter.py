"""Keeps the number of connections below the limit on open files, at which libzmq aborts the process."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq

from zmqengine.worker.wire.descriptors import (
    CONNECTIONS_PER_FRONT_END,
    RESERVED,
    files_open,
    lowest_free,
    socket_at,
)
from zmqengine.worker.wire.socket_files import hidden

log = logging.getLogger("zmqengine.worker")

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
CLOSED_S = 0.2
"""Minimum seconds without new connections: a flood is accepted in a few waves, each with all free descriptors."""
LOOK_EVERY = 16
"""Monitor events that are read between two checks of the descriptors in use, of which events may tell late."""
GIVE_WAY_S = 0.001
"""Seconds for which the thread gives way after that many events: the actor needs the interpreter."""


def doors_of(
    monitors: Sequence[zmq.Socket[bytes]], paths: Sequence[Path], connections_max: int
) -> list[Door]:
    """A door for each socket. `paths`: files of ipc sockets; none on tcp.

    Each socket has the same share of the connections, as a front-end has one at each: whoever is let in at the first is
    let in at the others, however many there are that wait.
    """
    share = max(1, connections_max // CONNECTIONS_PER_FRONT_END)
    files_max = files_open() + RESERVED + connections_max
    files: Sequence[Path | None] = paths or [None] * len(monitors)
    return [Door(monitor, path, share, files_max) for monitor, path in zip(monitors, files, strict=True)]


class Door:
    """Counts the connections of one socket by libzmq's monitor events, and refuses those beyond `connections_max`.

    One that was accepted beyond it is shut down. On ipc the worker stops accepting: the socket's file gets another
    name, so that no peer finds it, while present connections continue; it gets its name back when there is room.
    `files_max`: open files of the process from which on nobody is let in. For the poller of one thread.
    """

    def __init__(
        self, monitor: zmq.Socket[bytes], path: Path | None, connections_max: int, files_max: int
    ) -> None:
        self.connections: set[int] = set()
        self._monitor = monitor
        self._path = path
        self._connections_max = connections_max
        self._files_max = files_max
        self._closed_s: float | None = None
        self._refused = 0

    def fileno(self) -> int:
        """Descriptor for a poller, readable on monitor events."""
        return cast(int, self._monitor.getsockopt(zmq.FD))

    def check(self) -> None:
        """Handle all waiting monitor events, then close or open. Called periodically, too."""
        events = 0
        while cast(int, self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if events % LOOK_EVERY == 0:
                self._close_if_full()
            events += 1
            # Event number and descriptor, as packed by libzmq; pyzmq's parser takes ten times as long.
            event, fd = struct.unpack("=HI", self._monitor.recv_multipart()[0])
            if event == _ACCEPTED:
                self.accepted(fd)
            else:
                self.connections.discard(fd)
        self._close_if_full()
        self._open_if_room()
        if self._refused:
            # One line for all of them: there may be hundreds at once.
            log.warning("connections turned away: there are too many", extra={"count": self._refused})
            self._refused = 0
        if events > LOOK_EVERY:
            time.sleep(GIVE_WAY_S)

    def accepted(self, fd: int) -> None:
        """Handle a new connection."""
        self.connections.add(fd)
        if len(self.connections) > self._connections_max:
            self._refused += 1
            # libzmq reports the end of the connection, which removes it here.
            with contextlib.suppress(OSError), socket_at(fd) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Let peers find the socket again."""
        if self._path is not None and self._closed_s is not None:
            self._closed_s = None
            with contextlib.suppress(OSError):
                hidden(self._path).rename(self._path)

    def _close_if_full(self) -> None:
        if self._path is None or self._closed_s is not None:
            return
        if len(self.connections) >= self._connections_max or lowest_free() >= self._files_max:
            self._closed_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._path.rename(hidden(self._path))
            log.info(
                "full: no further connections", extra={"path": self._path, "count": len(self.connections)}
            )

    def _open_if_room(self) -> None:
        if self._closed_s is None or len(self.connections) >= self._connections_max:
            return
        # Connections that no event has told of yet may have taken all descriptors.
        if time.monotonic() >= self._closed_s + CLOSED_S and lowest_free() < self._files_max:
            self.open()
