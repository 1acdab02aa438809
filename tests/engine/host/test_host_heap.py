"""Memory of freed arrays is used for the next ones, unless the user has decided otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Page faults of some arrays' life: the first ones may be new to the process, the third ones are not.
PROGRAM = """
import ctypes, resource
from zmqengine.engine.host.host_heap import ARRAY_BYTES_MAX, keep_freed_arrays
print(keep_freed_arrays())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = ARRAY_BYTES_MAX // 4
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(4)]
    for array in arrays:
        ctypes.memset(array, 1, size)
    for array in arrays:
        libc.free(array)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems keep memory in their own way")
def test_freed_memory_is_used_again() -> None:
    """Without page faults, which it has otherwise; a variable that the user has set stays as it is."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    kept, faults = _run(plain)
    assert (kept, faults < 100) == ("True", True)
    kept, faults = _run(plain | {"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert (kept, faults > 1000) == ("False", True)


def _run(environment: dict[str, str]) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)
