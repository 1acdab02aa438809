"""Ends the process when one pass takes too long or loading makes no progress, whatever the cause."""

from __future__ import annotations

import faulthandler
import signal
import threading
from math import ceil
from types import TracebackType

# Seconds between two counts of the watching thread.
_TICK_S = 1.0
_LOCKED = 10
"""Factor of the time-out for a hang that blocks the counting thread, which is indistinguishable from a stopped
process."""


class Watchdog:
    """Bounds the time between two beats: past it, the main thread's stack goes to standard error and the process ends.

    A thread counts ticks without a beat, at most one of them while the process is stopped (SIGSTOP, a debugger, a
    paused container). After `timeout_s` of ticks it sends SIGALRM to the main thread, whose handler in C writes the
    stack of that thread: one that another thread writes while it changes may end in a crash instead. Native code that
    holds the interpreter's lock blocks the counting as well. A timer, reset by every tick, ends the process then, after
    ten times `timeout_s`; it continues while the process is stopped. A pass shorter than `timeout_s` is never ended; a
    longer one at most two ticks after `timeout_s`. Nothing is watched before the first beat, except between two reports
    of progress while loading. A `timeout_s` of 0 watches no pass. There is one watchdog a process, for its main thread.
    """

    def __init__(self, timeout_s: float, *, fd: int = 2) -> None:
        """Watch with `timeout_s`, writing the stack to the file descriptor `fd`."""
        self._tick_s = min(_TICK_S, timeout_s / 10) or _TICK_S
        self._pass_ticks = self._ticks(timeout_s)
        # Written by the watched thread, read by the counting one: ticks without a beat until the end, or None; beats.
        self._limit: int | None = None
        self._beats = 0
        self._is_watching = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        # The earlier action of SIGALRM follows the stack: the system's default ends the process.
        faulthandler.register(signal.SIGALRM, file=fd, all_threads=False, chain=True)

    def beat(self) -> None:
        """Note that a pass begins."""
        self._watch(self._pass_ticks)

    def expect_within(self, timeout_s: float) -> None:
        """Note progress of loading, and expect more within `timeout_s`; 0 watches nothing until the next call."""
        self._watch(self._ticks(timeout_s))

    def pause(self) -> None:
        """Stop watching until the next beat: the actor is about to wait for work. Idempotent."""
        self._limit = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._limit = None
        self._is_closed.set()
        self._is_watching.set()
        if self._thread is not None:
            self._thread.join()
        faulthandler.unregister(signal.SIGALRM)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ticks(self, timeout_s: float) -> int | None:
        return ceil(timeout_s / self._tick_s) if timeout_s else None

    def _watch(self, limit: int | None) -> None:
        self._beats += 1
        self._limit = limit
        if limit is not None and not self._is_watching.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._count, name="watchdog", daemon=True)
                self._thread.start()
            # Set here as well: the counting thread may not run again before a hang.
            self._set_timer(limit)
            self._is_watching.set()

    def _count(self) -> None:
        seen, silent = -1, 0
        while not self._is_closed.is_set():
            self._is_watching.wait()
            limit, beats = self._limit, self._beats
            if limit is None:
                self._set_timer(0)
                self._is_watching.clear()
                # A beat happened between the two lines.
                if self._limit is not None:
                    self._is_watching.set()
                continue
            if beats != seen:
                seen, silent = beats, 0
            if silent >= limit:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            self._set_timer(limit)
            self._is_closed.wait(self._tick_s)
            silent += 1
        self._set_timer(0)

    def _set_timer(self, ticks: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, _LOCKED * ticks * self._tick_s)
