"""Settings of glibc's heap for MLX's CPU back-end: freed arrays stay in the process for the next ones.

MLX's CPU back-end calls malloc for every array. By default glibc returns memory of this size to the system at once, and
the page faults of new memory take 3 times as long as a copy of a prompt's caches. The worker's `process/heap.py`
releases unused memory.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 256 << 20
"""Maximum free bytes at the end of the heap."""
ARRAY_BYTES_MAX = 32 << 20
"""Larger arrays are mapped separately. The maximum that glibc accepts."""
# /usr/include/malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_arrays() -> bool:
    """Apply the settings. Returns False on other systems, and where the user has set them."""
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, ARRAY_BYTES_MAX) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
