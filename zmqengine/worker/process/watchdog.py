"""Ends the process when one pass takes too long, or loading stands still, whatever holds it up."""

from __future__ import annotations

import faulthandler
import signal
from types import TracebackType

_REARM_EVERY_S = 1.0


class Watchdog:
    """Bounds the time between two beats: past it, the main thread's stack goes to standard error and the process ends.

    It ends by SIGALRM, which the kernel sends and no interpreter lock holds up: native code that spins and holds the
    lock is noticed too. The stack is written by the thread that hangs, so that it cannot change meanwhile: one that
    another thread writes while it changes may end in a crash instead. A pass shorter than `timeout_s` is never ended;
    a longer one at most 1 s after `timeout_s` (a tenth of it for a short one). Time in which the process is stopped
    counts, as the timer runs on: stopped for that long within a pass, it ends when it is continued. Nothing is watched
    before the first beat, except between two words of progress while loading. A `timeout_s` of 0 watches no pass. There
    is one watchdog a process, for its main thread.
    """

    def __init__(self, timeout_s: float, *, fd: int = 2) -> None:
        """Watch with `timeout_s`, writing the stack to the file descriptor `fd`."""
        self._timeout_s = timeout_s
        # Setting the timer takes some microseconds: too much for every pass, nothing once a second.
        self._rearm_every_s = min(_REARM_EVERY_S, timeout_s / 10)
        self._armed_s: float | None = None
        # What SIGALRM did before comes after the stack: the system's default ends the process.
        faulthandler.register(signal.SIGALRM, file=fd, all_threads=False, chain=True)

    def beat(self, now_s: float) -> None:
        """Say that a pass begins. `now_s` is of a monotonic clock."""
        if self._armed_s is not None and now_s - self._armed_s < self._rearm_every_s:
            return
        if self._timeout_s:
            # The extra time makes up for a last beat that came just before the next re-arming was due.
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s + self._rearm_every_s)
        self._armed_s = now_s

    def expect_within(self, timeout_s: float) -> None:
        """Say that loading got further, and is to get further again within `timeout_s`; 0 watches nothing till then."""
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        self._armed_s = None

    def pause(self) -> None:
        """Stop watching until the next beat: the actor is about to wait for work. Idempotent."""
        if self._armed_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._armed_s = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._armed_s = None
        faulthandler.unregister(signal.SIGALRM)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
