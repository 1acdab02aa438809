"""Returns freed memory to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

GROWN_BYTES = 32 << 20
"""Bytes above the least resident size from which a trim is worthwhile, and above the largest for a burst."""
LOOK_S, INTERVAL_S_MAX = 1.0, 600.0
"""Seconds between two looks, and at most between two trims. What a trim gives back and the next step uses again costs
that step a fault a page: in a virtual machine whose host had taken the pages, up to 12 ms for each 2 MB."""
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
        self._least_bytes = self._most_bytes = resident_bytes()
        self._interval_s = LOOK_S
        self._next_s = self._look_s = 0.0

    def expect(self) -> None:
        """Note that much memory may just have been freed: the next look trims."""
        self._interval_s, self._next_s = LOOK_S, 0.0

    def release(self) -> None:
        """Trim the heap now, however little that frees."""
        if self._trim is not None:
            self._trim(0)

    def keep(self, now_s: float) -> None:
        """Trim the heap after a burst, and again after twice the time: until then the memory of a burst may be in use,
        and later the arrays of steps alone come back."""
        if self._trim is None or now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        resident = resident_bytes()
        if resident > self._most_bytes + GROWN_BYTES:
            self._most_bytes = resident
            self.expect()
        if now_s < self._next_s:
            return
        if resident > self._least_bytes + GROWN_BYTES:
            self.release()
        self._least_bytes = min(self._least_bytes, resident_bytes())
        self._next_s = now_s + self._interval_s
        self._interval_s = min(INTERVAL_S_MAX, 2 * self._interval_s)


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
