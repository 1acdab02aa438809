"""Freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from zmqengine.worker.heap import Heap, resident_bytes
heap = Heap()
before = resident_bytes()
# Blocks below glibc's bound for mmap, and one at the end that pins the top of the heap.
blocks = [bytearray(100_000) for _ in range(2000)]
pin = bytearray(100_000)
grown = resident_bytes()
del blocks
heap.keep(100.0)
print(before, grown, resident_bytes())
heap.keep(101.0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS gives memory back by itself")
def test_memory_of_a_burst_is_given_back() -> None:
    """200 MB taken and freed: what stays is little."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    before, grown, after = map(int, output.split())
    assert grown - before > 150 << 20
    assert after - before < 32 << 20
