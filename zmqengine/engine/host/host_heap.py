"""Settings of glibc's heap for MLX's CPU back-end: freed arrays stay in the process for the next ones.

MLX's CPU back-end calls malloc for every array. By default glibc returns memory of this size to the system at once, and
the page faults of new memory take 3 times as long as a copy of a prompt's caches. The worker's `process/heap.py`
releases unused memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KEPT_BYTES = 256 << 20
"""Maximum free bytes at the end of the heap."""
ARRAY_BYTES_MAX = 32 << 20
"""Larger arrays are mapped separately. The maximum that glibc accepts."""
# /usr/include/malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_arrays() -> bool:
    """Apply the settings. Returns False on other systems, and where the user has set them."""
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, ARRAY_BYTES_MAX) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def used_bytes() -> int:
    """Bytes that the C library has handed out and not got back; 0 where it does not count them (musl, glibc before
    2.33).

    Takes microseconds, and 20 to 40 ns for each free block. Python's small objects and arrays on a GPU are not among
    them.
    """
    library = _library()
    if hasattr(library, "mallinfo2"):
        info = library.mallinfo2()
        return int(info.uordblks + info.hblkhd)
    if hasattr(library, "malloc_zone_statistics"):
        zones = _ZoneStatistics()
        library.malloc_zone_statistics(None, ctypes.byref(zones))
        return int(zones.size_in_use)
    return 0


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
    return library


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of /usr/include/malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


class _ZoneStatistics(ctypes.Structure):
    """`malloc_statistics_t` of macOS's <malloc/malloc.h>; without a zone, of all zones. Not tried."""

    _fields_ = [
        ("blocks_in_use", ctypes.c_uint),
        ("size_in_use", ctypes.c_size_t),
        ("max_size_in_use", ctypes.c_size_t),
        ("size_allocated", ctypes.c_size_t),
    ]
