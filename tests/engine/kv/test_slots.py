"""A random life of slots, against a plain model of it."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine.cpu.numpy_attention import NumpyStorage
from zmqengine.engine.kv.block_layout import Group, SlotBlocks, cut
from zmqengine.engine.kv.slots import (
    CAPACITY_MIN,
    COPIED_TOKENS,
    POOLS_MAX,
    KVShape,
    MlxStorage,
    Slot,
    Slots,
)

# Layers of two shapes: their arrays are groups of their own in blocks of the prefix cache.
SHAPES = [KVShape(2, 3, mx.float32), KVShape(1, 5, mx.float32), KVShape(2, 3, mx.float32)]
TOKEN_BYTES = sum(2 * shape.heads * shape.dim * 4 for shape in SHAPES)
CONTEXT_TOKENS = 4096
STORAGES: dict[str, Any] = {"mlx": MlxStorage, "numpy": NumpyStorage}

OPERATIONS = ("take", "take", "take", "write", "write", "grow", "close", "spoil", "restore", "trim")


class Life:
    """Slots, and what each of them holds: an array [heads, tokens, dim] for keys and values of each layer."""

    def __init__(self, storage: Any) -> None:
        self.slots = Slots(SHAPES, CONTEXT_TOKENS, storage)
        self.blocks = SlotBlocks(self.slots)
        self.rows: list[tuple[Slot, list[np.ndarray]]] = []
        self._random = np.random.default_rng(1)

    def numbers(self, tokens: int) -> list[np.ndarray]:
        """Keys and values of so many tokens, of each layer."""
        shapes = [shape for shape in SHAPES for _ in range(2)]
        return [
            self._random.normal(size=(each.heads, tokens, each.dim)).astype(np.float32) for each in shapes
        ]

    def put(self, slot: Slot, start: int, numbers: list[np.ndarray]) -> None:
        for array, one in zip(arrays(slot), numbers, strict=True):
            self.slots.storage.write([array], slot.index, start, mx.array(one)[None, None])

    def take(self, tokens: int) -> None:
        slot = self.slots.take(tokens)
        assert slot.capacity >= tokens
        # What the last row has left may be anything that 0 times is 0.
        assert all(np.isfinite(held(array, slot)).all() for array in arrays(slot))
        self.rows.append((slot, self.numbers(0)))

    def write(self, row: int) -> None:
        """A piece of a row behind its tokens, or over some that are rolled back."""
        slot, known = self.rows[row]
        kept = max(0, known[0].shape[1] - int(self._random.integers(0, 4)))
        count = min(int(self._random.integers(1, 300)), slot.capacity - kept)
        numbers = self.numbers(count)
        self.put(slot, kept, numbers)
        joined = [
            np.concatenate([old[:, :kept], new], axis=1) for old, new in zip(known, numbers, strict=True)
        ]
        self.rows[row] = slot, joined

    def grow(self, row: int) -> None:
        slot, known = self.rows[row]
        if 2 * slot.capacity <= CONTEXT_TOKENS:
            larger = self.slots.move(slot, slot.capacity + 1, known[0].shape[1])
            assert larger.capacity == self.slots.capacity(slot.capacity + 1) >= 2 * slot.capacity
            self.rows[row] = larger, known

    def close(self, row: int) -> None:
        self.rows.pop(row)[0].close(is_finite=True)

    def spoil(self, row: int) -> None:
        """A row ends with numbers that are not finite, in any column."""
        slot, _ = self.rows.pop(row)
        column = int(self._random.integers(0, slot.capacity))
        self.put(slot, column, [each * np.nan for each in self.numbers(1)])
        slot.close(is_finite=False)

    def trim(self, waiting: int) -> None:
        """All memory that no row has is freed, but for what `waiting` short rows will take."""
        before = self.slots.empty_bytes
        self.slots.trim([1] * waiting)
        assert self.slots.unneeded_bytes([1] * waiting) == 0
        assert self.slots.empty_bytes <= min(before, waiting * CAPACITY_MIN * TOKEN_BYTES)

    def restore(self, row: int) -> None:
        """A copy of a row by blocks, but for its last token."""
        slot, known = self.rows[row]
        tokens = known[0].shape[1] - 1
        if tokens < 1:
            return
        cuts = sorted({max(1, tokens // 3), tokens + 1})
        parts = self.blocks.take(slot, 0, cuts)
        copy = self.blocks.build(parts, tokens, None, tokens + 7)
        assert copy.capacity >= tokens + 7
        self.rows.append((copy, [each[:, :tokens] for each in known]))

    def check(self) -> None:
        places = [(id(slot.pool), slot.index) for slot, _ in self.rows]
        assert len(set(places)) == len(places), "a slot is given twice"
        for slot, known in self.rows:
            for array, wanted in zip(arrays(slot), known, strict=True):
                np.testing.assert_array_equal(held(array, slot)[:, : wanted.shape[1]], wanted)
        slots, pools = self.slots, self.slots.pools
        assert slots.byte_count == sum(slot.capacity * TOKEN_BYTES for slot, _ in self.rows)
        assert slots.empty_bytes >= 0
        if slots.storage.on_mlx:
            every = sum(array.nbytes for pool in pools.values() for array in (*pool.keys, *pool.values))
            assert slots.byte_count + slots.empty_bytes == every
        for pool in pools.values():
            used = [slot.index for slot, _ in self.rows if slot.pool is pool]
            assert used or not pool.keys, "a pool without rows has arrays"


def arrays(slot: Slot) -> list[Any]:
    pairs = zip(slot.pool.keys, slot.pool.values, strict=True)
    return [array for pair in pairs for array in pair]


def held(array: Any, slot: Slot) -> np.ndarray:
    return np.array(array[slot.index])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", range(4))
def test_rows_keep_their_numbers_whoever_comes_grows_and_leaves(storage: str, seed: int) -> None:
    """No slot is given twice, moves and growth keep numbers, unclean slots are cleared, bytes add up."""
    life, draw = Life(STORAGES[storage]()), random.Random(seed)
    for _ in range(60):
        name = draw.choice(OPERATIONS)
        if name == "take":
            # Most rows share a pool.
            life.take(draw.choice((draw.randint(1, 512), draw.randint(1, 1100), draw.randint(1, 3000))))
        elif life.rows:
            getattr(life, name)(draw.randrange(len(life.rows)))
        life.check()
    while life.rows:
        life.close(0)
        life.check()
    assert life.slots.byte_count == life.slots.empty_bytes == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_the_free_slot_with_the_least_index_is_taken(storage: str) -> None:
    """Attention covers all slots up to the last one in use. A pool grows by half, and is freed with its last row."""
    slots = Slots(SHAPES, CONTEXT_TOKENS, STORAGES[storage]())
    taken = [slots.take(100) for _ in range(9)]
    assert [slot.index for slot in taken] == list(range(9))
    (pool,) = slots.pools.values()
    assert 9 <= pool.rows <= max(13, slots.storage.slots_least)
    for index in (5, 2, 7):
        taken[index].close(is_finite=True)
    assert [slots.take(100).index for _ in range(4)] == [2, 5, 7, 9]
    with pytest.raises(AssertionError, match="given back once"):
        taken[5].close(is_finite=True)


def test_slots_come_in_few_capacities() -> None:
    """Powers of two, so a row uses at least half of its slot, but for the shortest; no more than kernels take. The slot
    of a full context is no larger than that and a verify block."""
    for context_tokens in (100, 4096, 131_072, 1 << 20, 1_000_001):
        slots = Slots(SHAPES, context_tokens)
        lengths = [*range(1, 2000, 7), *(context_tokens * part // 97 for part in range(1, 98))]
        lengths += [context_tokens, context_tokens + 8]
        capacities = {
            tokens: slots.capacity(tokens) for tokens in lengths if 0 < tokens <= context_tokens + 8
        }
        assert len({*capacities.values()}) <= POOLS_MAX
        least = min(capacities.values())
        assert least >= CAPACITY_MIN
        for tokens, capacity in capacities.items():
            assert tokens <= capacity
            assert capacity < 2 * tokens + CAPACITY_MIN or capacity == least
            assert capacity <= max(least, context_tokens + 8 + CAPACITY_MIN)
            assert slots.project_bytes(tokens) == capacity * TOKEN_BYTES


def test_memory_of_the_host_counts_once_it_is_written() -> None:
    """The system gives memory to what is written alone: slots that no row has had take none."""
    slots = Slots(SHAPES, CONTEXT_TOKENS, NumpyStorage())
    first, second = slots.take(10), slots.take(10)
    assert (slots.byte_count, slots.empty_bytes) == (2 * first.bytes, 0)
    second.close(is_finite=True)
    assert (slots.byte_count, slots.empty_bytes) == (first.bytes, first.bytes)
    first.close(is_finite=True)
    assert (slots.byte_count, slots.empty_bytes) == (0, 0)


REUSED = """
from zmqengine.engine.cpu.numpy_attention import NumpyStorage
from zmqengine.engine.host.host_heap import keep_freed_arrays
from zmqengine.worker.process.heap import Heap, resident_bytes
import mlx.core as mx
assert keep_freed_arrays()
def arrays():
    return [NumpyStorage().zeros((32, 2, 2048, 32), mx.float32) for _ in range(4)]
filled, pin = arrays(), bytearray(100_000)
for each in filled:
    each.fill(1)
del filled, each
Heap().release()
before = resident_bytes()
again = arrays()
for each in again:
    each[0, :, :100] = 1
assert not any(each[1:].any() for each in again)
print(resident_bytes() - before, pin[0])
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other systems do not keep the memory of freed arrays"
)
def test_memory_of_the_host_that_was_freed_is_not_cleared_before_it_is_written() -> None:
    """100 tokens of each of four arrays of 16 MiB: a step that took a slot cleared all of them, page by page."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    output = subprocess.run(
        [sys.executable, "-c", REUSED], capture_output=True, text=True, check=True, env=plain
    ).stdout
    assert int(output.split()[0]) < 16 << 20


def test_blocks_are_copied_in_pieces_as_long_as_they_may_be() -> None:
    """Wherever in a row they begin: two copies of a piece exist at once."""
    block, start = COPIED_TOKENS // 4, 10 * COPIED_TOKENS
    copied: list[tuple[int, int]] = []

    def stacked(group: Group, first: int, end: int) -> mx.array:
        copied.append((first, end))
        return mx.arange(first, end).reshape(1, 1, -1, 1)

    cuts = [start + block * (number + 1) for number in range(6)]
    parts = cut([Group([(0, "keys")], 1, 1, mx.int32)], stacked, start, cuts)
    assert copied == [(start, start + COPIED_TOKENS), (start + COPIED_TOKENS, cuts[-1])]
    assert mx.concatenate([part for (part,) in parts], axis=2).flatten().tolist() == list(
        range(start, cuts[-1])
    )
