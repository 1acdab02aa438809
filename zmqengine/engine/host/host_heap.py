"""Freed arrays that the C library keeps for the next ones, where MLX computes in memory of the host.

MLX's CPU backend asks malloc for every array. glibc hands memory of this size back to the system at once, and new
memory comes page by page: 3 times the cost of copying a prompt's caches. The worker's `heap.py` gives back what is
not used again.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 256 << 20
"""What may lie free at the end of the heap."""
ARRAY_BYTES_MAX = 32 << 20
"""A larger array is on its own. The most that glibc takes."""
# /usr/include/malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_arrays() -> bool:
    """Have glibc keep them. Returns whether it does: not on other systems, and not where the user has chosen."""
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, ARRAY_BYTES_MAX) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
