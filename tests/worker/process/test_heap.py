"""Freed memory goes back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from zmqengine.worker.process import heap

PROGRAM = """
from zmqengine.worker.process.heap import Heap, resident_bytes
heap = Heap()
before = resident_bytes()
# Blocks below glibc's bound for mmap, and one at the end that pins the top of the heap.
blocks = [bytearray(100_000) for _ in range(2000)]
pin = bytearray(100_000)
grown = resident_bytes()
del blocks
heap.keep(100.0)
after = resident_bytes()
# Less than is worth a trim while there is work.
blocks = [bytearray(100_000) for _ in range(200)]
pin = [pin, bytearray(100_000)]
del blocks
heap.keep(200.0)
kept = resident_bytes()
heap.release()
print(before, grown, after, kept, resident_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS gives memory back by itself")
def test_memory_of_a_burst_is_given_back() -> None:
    """200 MB taken and freed: what stays is little; of 20 MB nothing stays at rest."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    before, grown, after, kept, at_rest = map(int, output.split())
    assert grown - before > 150 << 20
    assert after - before < 32 << 20
    assert kept - after > 16 << 20
    assert at_rest - after < 4 << 20


def test_memory_that_is_used_again_is_seldom_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's arrays come back after each trim: 10 trims in ten minutes, then one in ten minutes. A larger burst is
    trimmed at once, and what has once been in use is none."""
    resident = 100 << 20
    trims = []

    def trim(pad: int) -> int:
        nonlocal resident
        trims.append(now_s)
        resident = 150 << 20
        return 1

    monkeypatch.setattr(heap, "resident_bytes", lambda: resident)
    own = heap.Heap()
    own._trim = trim
    for now_s in range(2300):
        # Steps with few rows and with many.
        resident = (200 + 100 * (now_s % 3)) << 20
        own.keep(now_s)
    assert trims == [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 1625, 2225]
    for now_s in range(2301, 2304):
        resident = 500 << 20
        own.keep(now_s)
    assert trims[15:] == [2301, 2302]


THREADS = """
import ctypes, threading
from zmqengine.engine.host.host_heap import keep_freed_arrays
from zmqengine.worker.process.heap import Heap, resident_bytes, share_one_arena
assert share_one_arena()
def take():
    started.wait()
    blocks = [bytearray(100_000) for _ in range(250)]
    taken.wait()
    del blocks
    given.wait()
started, taken, given = (threading.Barrier(5) for _ in range(3))
threads = [threading.Thread(target=take, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
assert keep_freed_arrays()
heap = Heap()
before = resident_bytes()
started.wait()
taken.wait()
grown = resident_bytes()
given.wait()
heap.keep(100.0)
print(before, grown, resident_bytes())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other systems give memory back in their own way"
)
def test_memory_that_threads_have_freed_is_given_back() -> None:
    """100 MB in blocks of four threads: glibc never releases the end of a thread's own arena."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    output = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, env=plain
    ).stdout
    before, grown, after = map(int, output.split())
    assert grown - before > 80 << 20
    assert after - before < 16 << 20


SET_APART = """
import gc
import zmqengine.worker.main
from zmqengine.worker.process.heap import set_apart
class Knot:
    alive = 0
    def __init__(self):
        Knot.alive += 1
        self.self = self
    def __del__(self):
        Knot.alive -= 1
gc.disable()
Knot()
set_apart()
before = Knot.alive
Knot()
gc.collect()
print(gc.get_freeze_count(), len(gc.get_objects()), before, Knot.alive)
"""


def test_what_was_imported_is_not_looked_at_again() -> None:
    """Only what is made afterwards is, and collected as ever; what was garbage before is gone first."""
    output = subprocess.run(
        [sys.executable, "-c", SET_APART], capture_output=True, text=True, check=True
    ).stdout
    frozen, watched, before, after = map(int, output.split())
    assert frozen > 10_000
    assert watched < frozen / 10
    assert before == after == 0
