"""Gives memory that was freed back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWN_BYTES = 32 << 20
"""Resident memory must have grown by this much since the last time before it is worth the look."""
INTERVAL_S = 5.0
_STATM = Path("/proc/self/statm")


class Heap:
    """The C library's heap. glibc keeps what a burst of messages took for as long as the process lives, unless asked.

    Elsewhere (macOS, musl) there is nothing to ask for, and `keep` does nothing.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._floor_bytes = resident_bytes()
        self._next_s = 0.0

    def keep(self, now_s: float) -> None:
        """Every few seconds, give back what can be given if much has been taken."""
        if self._trim is None or now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        if resident_bytes() > self._floor_bytes + GROWN_BYTES:
            self._trim(0)
            self._floor_bytes = resident_bytes()


def resident_bytes() -> int:
    """What this process holds in memory; 0 where the system does not tell it this way."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
