"""Ends the process when one pass takes too long, whatever holds it up."""

from __future__ import annotations

import faulthandler
from types import TracebackType

_REARM_EVERY_S = 1.0


class Watchdog:
    """Bounds the time between two beats: past it, all stacks go to standard error and the process exits.

    The exit code is 1. The clock runs in a C thread that needs no interpreter lock, so native code that
    spins and holds the lock is noticed too. A pass shorter than `timeout_s` is never ended; a longer one
    is ended at most 1 s after `timeout_s` (a tenth of it for a short one). Nothing is watched before the
    first beat, so that loading may take its time. A `timeout_s` of 0 watches nothing. There is one
    watchdog a process.
    """

    def __init__(self, timeout_s: float, *, fd: int = 2) -> None:
        """Watch with `timeout_s`, writing stacks to the file descriptor `fd`."""
        self._timeout_s = timeout_s
        # Starting the C thread takes 25 to 50 us: too much for every pass, nothing once a second.
        self._rearm_every_s = min(_REARM_EVERY_S, timeout_s / 10)
        self._fd = fd
        self._armed_s: float | None = None

    def beat(self, now_s: float) -> None:
        """Say that a pass begins. `now_s` is of a monotonic clock."""
        if self._armed_s is not None and now_s - self._armed_s < self._rearm_every_s:
            return
        if self._timeout_s:
            # The extra time makes up for a last beat that came just before the next re-arming was due.
            faulthandler.dump_traceback_later(self._timeout_s + self._rearm_every_s, exit=True, file=self._fd)
        self._armed_s = now_s

    def pause(self) -> None:
        """Stop watching until the next beat: the actor is about to wait for work. Idempotent."""
        if self._armed_s is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_s = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self.pause()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
