"""Bounds on the connections of this process: libzmq aborts it when an ipc listener finds no free descriptor."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger("zmqengine.worker")

CONNECTIONS_PER_FRONT_END = 3
"""ctl, cmd and out."""
RESERVED = 64
"""Descriptors reserved for a model's files, key files and the compiler of kernels."""
ROOM_MAX = 3500
"""Maximum descriptors left for connections that arrive before the limiter can refuse them."""
BACKLOG_MAX = 1024
"""Maximum connections that the kernel queues."""
# macOS reports no limit, but refuses values above a setting of the kernel.
_TRIED = (1 << 20, 1 << 18, 1 << 16, 24_576, 10_240, 4096, 1024)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Maximum number of connections, and of connections waiting to be accepted at each of the three sockets.

    Connections are still accepted between the moment that `connections_max` is reached and the moment that accepting
    stops. The reserve for them must last until a thread of this process runs, and exceed the backlogs of all three
    sockets: two thirds of all descriptors, where these are few.
    """

    connections_max: int
    backlog: int

    @classmethod
    def within(cls, files_max: int, files_open: int) -> ConnectionBounds:
        """The number of connections that a limit on open files allows."""
        free = max(0, files_max - files_open - RESERVED)
        room = min(ROOM_MAX, free * 2 // 3)
        return cls(connections_max=max(1, free - room), backlog=max(1, min(BACKLOG_MAX, room // 12)))

    def check(self, sessions_max: int, files_max: int) -> str | None:
        """A line for the operator if `sessions_max` front-ends do not fit, or None."""
        if CONNECTIONS_PER_FRONT_END * sessions_max <= self.connections_max:
            return None
        fit = self.connections_max // CONNECTIONS_PER_FRONT_END
        return (
            f"--sessions-max {sessions_max} does not fit: the limit of {files_max} open files leaves room for "
            f"{fit} front-ends; raise it (ulimit -n, LimitNOFILE=) or lower --sessions-max"
        )


def raise_limit() -> int:
    """Raise the limit on open files as far as this user may; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _TRIED if hard == resource.RLIM_INFINITY else (hard,):
        if soft != resource.RLIM_INFINITY and wanted > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _TRIED[0] if soft == resource.RLIM_INFINITY else soft


def files_open() -> int:
    """Number of open descriptors: takes a millisecond for a thousand. Raises `OSError` if none can be opened."""
    return len(os.listdir("/dev/fd"))


def lowest_free() -> int:
    """The lowest free descriptor; all below are open. Takes a microsecond, and never raises."""
    try:
        fd = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return _TRIED[0]
    os.close(fd)
    return fd


@contextlib.contextmanager
def socket_at(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that libzmq has named, under a descriptor of its own; `OSError` if it has none.

    libzmq may have closed the descriptor since: it is free then, or another socket's, or a file's.
    """
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def bound_connections(sessions_max: int) -> ConnectionBounds:
    """Raise the limit and compute the bounds within it. Logs a warning if `sessions_max` does not fit."""
    files_max = raise_limit()
    bounds = ConnectionBounds.within(files_max, files_open())
    too_many = bounds.check(sessions_max, files_max)
    if too_many is not None:
        log.warning(too_many)
    return bounds
