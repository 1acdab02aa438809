"""Keeps the connections of a worker below the limit on open files: libzmq would abort the process there."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq

from zmqengine.worker.wire.descriptors import RESERVED, files_open, lowest_free
from zmqengine.worker.wire.socket_files import hidden

log = logging.getLogger("zmqengine.worker")

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
REOPEN_SHARE = 0.9
CLOSED_S = 0.2
"""For so long at the least: a flood is taken in a few waves, and each has all the room there is."""
FLOOD = 8
FLOOD_WAIT_S = 0.001
LOOK_EVERY = 16
"""So many pieces of news are read between two looks at how many descriptors are in use."""
PEER_SHARE = 0.5
"""Of all connections, for one process; where the system tells which process it is (ipc on Linux)."""


class ConnectionLimiter:
    """Counts connections by what libzmq's monitors tell, and turns away what is too many.

    A connection beyond the bound is shut down as soon as it is seen. On ipc the doors are closed as well: the socket's
    file gets another name, so that nobody finds it, while those who are connected go on; it comes back when there is
    room. No process gets more than half of the connections. `watches` are for the poller of one thread.

    What the monitors tell is old when many come at once: more are let in while it is read. So the descriptors in use
    are looked at too, before all else, and little is done for each connection until the doors are closed.
    """

    def __init__(
        self, monitors: Sequence[zmq.Socket[bytes]], paths: Sequence[Path], connections_max: int
    ) -> None:
        self.watches = [Watch(monitor, self) for monitor in monitors]
        self._paths = paths
        self._connections_max = connections_max
        self._peer_max = max(3, int(connections_max * PEER_SHARE))
        self._peers: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        files = files_open() + RESERVED
        self._close_files = files + connections_max
        self._reopen_files = files + int(connections_max * REOPEN_SHARE)
        self._closed = False
        self._closed_at_s = 0.0
        self.turned_away = 0
        self._turned_away_for: Counter[str] = Counter()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._peers)

    def accepted(self, fd: int) -> None:
        """Somebody has connected."""
        self._forget(fd)
        # Asking the kernel is left until somebody may have too many: connections may come by the thousand.
        peer = 0
        if len(self._peers) >= self._peer_max:
            self._ask_about_all()
            peer = _process_behind(fd)
        self._peers[fd] = peer
        self._held[peer] += 1
        if len(self._peers) > self._connections_max:
            self._close_doors()
            self._turn_away(fd, "there are too many")
        elif peer > 0 and self._held[peer] > self._peer_max:
            self._turn_away(fd, "one process has half of them")

    def disconnected(self, fd: int) -> None:
        """A connection is over."""
        self._forget(fd)

    def look_for_flood(self) -> None:
        """Close the doors if more have come than the monitors have told of yet."""
        if self._paths and not self._closed and lowest_free() >= self._close_files:
            self._close_doors()

    def tell_turned_away(self) -> None:
        """One line for all since the last: there may be hundreds at once."""
        for reason, count in self._turned_away_for.items():
            log.warning(
                "connections turned away",
                extra={"reason": reason, "count": count, "connections": len(self._peers)},
            )
        self._turned_away_for.clear()

    def look_for_room(self) -> None:
        """Open the doors again if there is room; after news, and now and then."""
        if not self._closed or len(self._peers) > self._connections_max * REOPEN_SHARE:
            return
        if time.monotonic() - self._closed_at_s < CLOSED_S:
            return
        # The news of libzmq may be old: more may have come since than were told yet, so many that none can be opened.
        with contextlib.suppress(OSError):
            if files_open() <= self._reopen_files:
                self.open_doors()

    def open_doors(self) -> None:
        """Let newcomers in again. Idempotent; also when the worker ends, so that its files are found and removed."""
        if self._closed:
            self._closed = False
            for path in self._paths:
                with contextlib.suppress(OSError):
                    hidden(path).rename(path)
            log.warning("accepting new connections again", extra={"connections": len(self._peers)})

    def _close_doors(self) -> None:
        if self._paths and not self._closed:
            self._closed = True
            self._closed_at_s = time.monotonic()
            for path in self._paths:
                with contextlib.suppress(OSError):
                    path.rename(hidden(path))
            log.warning(
                "not accepting new connections: the limit on open files is near, or would soon be",
                extra={"connections": len(self._peers), "files_open": lowest_free()},
            )

    def _turn_away(self, fd: int, reason: str) -> None:
        self.turned_away += 1
        self._turned_away_for[reason] += 1
        if self._turned_away_for.total() > FLOOD:
            self._close_doors()
        # libzmq sees the end of the connection and says so: it is forgotten then.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def _ask_about_all(self) -> None:
        for fd in [fd for fd, peer in self._peers.items() if not peer]:
            self._forget(fd)
            peer = self._peers[fd] = _process_behind(fd) or -1
            self._held[peer] += 1

    def _forget(self, fd: int) -> None:
        peer = self._peers.pop(fd, None)
        if peer is not None:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]


class Watch:
    """One socket's monitor, for a poller."""

    def __init__(self, monitor: zmq.Socket[bytes], doorman: ConnectionLimiter) -> None:
        self._monitor = monitor
        self._doorman = doorman

    def fileno(self) -> int:
        """Readable when connections may have come or gone."""
        return cast(int, self._monitor.getsockopt(zmq.FD))

    def check(self) -> None:
        """Take in all that has happened."""
        news = 0
        while cast(int, self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if news % LOOK_EVERY == 0:
                self._doorman.look_for_flood()
            news += 1
            # Number and descriptor, as libzmq packs them; pyzmq's own reading takes ten times as long.
            event, fd = struct.unpack("=HI", self._monitor.recv_multipart()[0])
            if event == _ACCEPTED:
                self._doorman.accepted(fd)
            else:
                self._doorman.disconnected(fd)
        self._doorman.tell_turned_away()
        self._doorman.look_for_room()
        if news > FLOOD:
            # Connections come and go by the thousand: the actor needs the interpreter more than they do.
            time.sleep(FLOOD_WAIT_S)


def _process_behind(fd: int) -> int:
    """The process at the other end of an ipc connection, as the kernel knows it; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", credentials)[0]
            return pid
    return 0
