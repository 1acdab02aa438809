"""How many connections this process may have. libzmq aborts it when an ipc listener finds no descriptor left."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from dataclasses import dataclass

log = logging.getLogger("zmqengine.worker")

CONNECTIONS_PER_FRONT_END = 3
"""ctl, cmd and out."""
RESERVED = 64
"""For the files of a model, key files, the compiler of kernels."""
ROOM_MAX = 3500
BACKLOG_MAX = 1024
# macOS says that there is no limit and then takes no higher one than a setting of the kernel.
_TRIED = (1 << 20, 1 << 18, 1 << 16, 24_576, 10_240, 4096, 1024)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How many connections are taken at once, and how many may wait to be taken, at each of the three sockets.

    Between the moment that there are `connections_max` and the moment that no more come in, some still do: the room
    that is left for them has to last until a thread of this process is given its turn, and longer than for those who
    wait at all three sockets: two thirds of what there is, where that is little.
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
        """A line for the operator if so many front-ends do not fit, or None."""
        if CONNECTIONS_PER_FRONT_END * sessions_max <= self.connections_max:
            return None
        fit = self.connections_max // CONNECTIONS_PER_FRONT_END
        return (
            f"--sessions-max {sessions_max} does not fit: the limit of {files_max} open files leaves room for "
            f"{fit} front-ends; raise it (ulimit -n, LimitNOFILE=) or lower --sessions-max"
        )


def raise_limit() -> int:
    """Raise the limit on open files as far as the system lets this user; returns the limit that is in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _TRIED if hard == resource.RLIM_INFINITY else (hard,):
        if soft != resource.RLIM_INFINITY and wanted > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _TRIED[0] if soft == resource.RLIM_INFINITY else soft


def files_open() -> int:
    """How many this process has open now: a millisecond for a thousand. Raises `OSError` when no more may be opened."""
    return len(os.listdir("/dev/fd"))


def lowest_free() -> int:
    """The number that the next file gets; all below are open. A microsecond, and it never raises."""
    try:
        fd = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return _TRIED[0]
    os.close(fd)
    return fd


def bound_connections(sessions_max: int) -> ConnectionBounds:
    """Raise the limit and see what fits into it. Says in the log when `sessions_max` does not."""
    files_max = raise_limit()
    bounds = ConnectionBounds.within(files_max, files_open())
    too_many = bounds.check(sessions_max, files_max)
    if too_many is not None:
        log.warning(too_many)
    return bounds
