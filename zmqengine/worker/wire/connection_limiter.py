"""Keeps the number of connections below the limit on open files, at which libzmq aborts the process."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq

from zmqengine.worker.wire.descriptors import RESERVED, files_open, lowest_free, socket_at
from zmqengine.worker.wire.socket_files import hidden

log = logging.getLogger("zmqengine.worker")

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
REOPEN_SHARE = 0.9
"""Share of the limit below which connections are accepted again, so that the socket does not open and close for each
of them."""
CLOSED_S = 0.2
"""Minimum seconds without new connections: a flood is accepted in a few waves, each with all free descriptors."""
FLOOD = 8
"""Refused connections from which on, within one look, the socket stops accepting."""
FLOOD_WAIT_S = 0.001
"""Seconds for which the thread gives way after that many events."""
LOOK_EVERY = 16
"""Monitor events that are read between two checks of the descriptors in use."""
PEER_SHARE = 0.5
"""Maximum share of all connections for one process, where the system knows the process (ipc on Linux)."""


class ConnectionLimiter:
    """Counts connections by libzmq's monitor events, and refuses connections beyond the bound.

    A connection beyond the bound is shut down at once. On ipc the worker also stops accepting: the socket's file gets
    another name, so that no peer finds it, while present connections continue; it gets its name back when there is
    room. No process gets more than half of the connections. `watches` are for the poller of one thread.

    In a flood monitor events are late: further connections are accepted while they are read. So the descriptors in use
    are checked first, and little is done for each connection until the worker stops accepting.
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
        self._refused_for: Counter[str] = Counter()

    def accepted(self, fd: int) -> None:
        """Handle a new connection."""
        self._forget(fd)
        # The kernel is asked for the process only when one may have too many: connections may come by the thousand.
        peer = 0
        if len(self._peers) >= self._peer_max:
            self._find_processes()
            peer = _process_behind(fd)
        self._peers[fd] = peer
        self._held[peer] += 1
        if len(self._peers) > self._connections_max:
            self._stop_accepting()
            self._refuse(fd, "there are too many")
        elif peer > 0 and self._held[peer] > self._peer_max:
            self._refuse(fd, "one process has half of them")

    def disconnected(self, fd: int) -> None:
        """Handle the end of a connection."""
        self._forget(fd)

    def check_for_flood(self) -> None:
        """Stop accepting if there are more connections than the monitors have reported yet."""
        if self._paths and not self._closed and lowest_free() >= self._close_files:
            self._stop_accepting()

    def log_refused(self) -> None:
        """Log one line for all refused connections since the last: there may be hundreds at once."""
        for reason, count in self._refused_for.items():
            log.warning(
                "connections turned away",
                extra={"reason": reason, "count": count, "connections": len(self._peers)},
            )
        self._refused_for.clear()

    def check_for_room(self) -> None:
        """Accept again if there is room. Called after monitor events and periodically."""
        if not self._closed or len(self._peers) > self._connections_max * REOPEN_SHARE:
            return
        if time.monotonic() - self._closed_at_s < CLOSED_S:
            return
        # Monitor events may be late: connections that are not reported yet may have taken all descriptors.
        with contextlib.suppress(OSError):
            if files_open() <= self._reopen_files:
                self.accept_again()

    def accept_again(self) -> None:
        """Accept connections again. Idempotent; also called at the worker's end, so that its files are removed."""
        if self._closed:
            self._closed = False
            for path in self._paths:
                with contextlib.suppress(OSError):
                    hidden(path).rename(path)
            log.warning("accepting new connections again", extra={"connections": len(self._peers)})

    def _stop_accepting(self) -> None:
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

    def _refuse(self, fd: int, reason: str) -> None:
        self._refused_for[reason] += 1
        if self._refused_for.total() > FLOOD:
            self._stop_accepting()
        # libzmq reports the end of the connection, which removes it here.
        with contextlib.suppress(OSError), socket_at(fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def _find_processes(self) -> None:
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

    def __init__(self, monitor: zmq.Socket[bytes], limiter: ConnectionLimiter) -> None:
        self._monitor = monitor
        self._limiter = limiter

    def fileno(self) -> int:
        """Descriptor for a poller, readable on monitor events."""
        return cast(int, self._monitor.getsockopt(zmq.FD))

    def check(self) -> None:
        """Handle all waiting monitor events."""
        news = 0
        while cast(int, self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if news % LOOK_EVERY == 0:
                self._limiter.check_for_flood()
            news += 1
            # Event number and descriptor, as packed by libzmq; pyzmq's parser takes ten times as long.
            event, fd = struct.unpack("=HI", self._monitor.recv_multipart()[0])
            if event == _ACCEPTED:
                self._limiter.accepted(fd)
            else:
                self._limiter.disconnected(fd)
        self._limiter.log_refused()
        self._limiter.check_for_room()
        if news > FLOOD:
            # There may be thousands of events: the actor needs the interpreter first.
            time.sleep(FLOOD_WAIT_S)


def _process_behind(fd: int) -> int:
    """Id of the process at the other end of an ipc connection; 0 where the kernel does not know it."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), socket_at(fd) as connection:
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", credentials)[0]
            return pid
    return 0
