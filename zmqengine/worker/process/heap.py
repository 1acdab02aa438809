"""Returns freed memory to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

GROWN_BYTES = 32 << 20
"""Bytes above the least resident size from which a trim is worthwhile."""
FREED_BYTES = 1 << 20
"""Least bytes that a trim frees to count as useful."""
INTERVAL_S, INTERVAL_S_MAX = 1.0, 60.0
"""Seconds between two trims; doubled while they free nothing, or memory that is soon used again."""
_STATM = Path("/proc/self/statm")
# /usr/include/malloc.h
_M_ARENA_MAX = -8


def share_one_arena() -> bool:
    """Have the threads that start from now on allocate from glibc's main arena; False on other systems.

    By default a thread has an arena of its own, up to eight for each core, and the free memory at the end of one is
    never released: `malloc_trim` leaves it out, and the threshold that keeps freed arrays
    (`zmqengine/engine/host/host_heap.py`) holds for each of them. Each would stay as large as the largest constraint
    that was ever compiled there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


class Heap:
    """The C library's heap. glibc keeps the memory of a burst of messages until the process ends, unless it is trimmed.

    `keep` does nothing on other systems (macOS, musl).
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._least_bytes = self._last_bytes = resident_bytes()
        self._freed_bytes = 0
        self._interval_s = INTERVAL_S
        self._next_s = self._checked_s = 0.0

    def expect(self) -> None:
        """Note that much memory may just have been freed: the next trim is not delayed."""
        self._interval_s = INTERVAL_S
        self._next_s = min(self._next_s, self._checked_s + INTERVAL_S)

    def release(self) -> None:
        """Trim the heap now, however little that frees."""
        if self._trim is not None:
            self._trim(0)

    def keep(self, now_s: float) -> None:
        """Trim the heap about once a second, and less often while that frees nothing, or memory that is in use again at
        the next call: the arrays of a model on a CPU, whose pages the system would clear each time."""
        if self._trim is None or now_s < self._next_s:
            return
        self._checked_s = now_s
        before = resident_bytes()
        grown_bytes = before - self._last_bytes
        is_burst = grown_bytes > self._freed_bytes + GROWN_BYTES
        if is_burst:
            self._interval_s = INTERVAL_S
        is_used_again = not is_burst and grown_bytes > self._freed_bytes / 2 >= FREED_BYTES
        if before > self._least_bytes + GROWN_BYTES:
            self.release()
        self._last_bytes = resident_bytes()
        self._freed_bytes = before - self._last_bytes
        in_vain = self._freed_bytes < FREED_BYTES or is_used_again
        self._interval_s = min(INTERVAL_S_MAX, 2 * self._interval_s) if in_vain else INTERVAL_S
        self._next_s = now_s + self._interval_s
        self._least_bytes = min(self._least_bytes, self._last_bytes)


def set_apart() -> None:
    """Exclude all present objects from Python's garbage collection: to scan the imported modules takes longer than a
    step of a GPU."""
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Resident bytes of this process; 0 where the system does not report them this way."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
