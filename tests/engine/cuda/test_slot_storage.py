"""Columns are written into slots in place, unknown to MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine.cuda.slot_storage import ARRAYS_MAX, CudaStorage, supports
from zmqengine.engine.kv.block_layout import SlotBlocks
from zmqengine.engine.kv.slots import KVShape, Slot, Slots

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels")]

LAYERS = 3
SHAPE = KVShape(2, 64, mx.float16)


def numbers(tokens: int, seed: int) -> mx.array:
    return mx.random.normal((1, SHAPE.heads, tokens, SHAPE.dim), key=mx.random.key(seed)).astype(SHAPE.dtype)


def new_slots(layers: int = LAYERS) -> Slots:
    return Slots([SHAPE] * layers, 4096, CudaStorage())


def arrays_of(slot: Slot) -> list[Any]:
    """Keys and values of all layers."""
    return [array for both in zip(slot.pool.keys, slot.pool.values, strict=True) for array in both]


def fill(slots: Slots, slot: Slot, start: int, tokens: int, seed: int) -> None:
    """Write columns of all layers."""
    arrays = arrays_of(slot)
    columns = mx.stack([numbers(tokens, seed + number) for number in range(len(arrays))])
    slots.storage.write(arrays, slot.index, start, columns)


def columns_of(slot: Slot, start: int, end: int) -> list[np.ndarray]:
    return [np.array(array[slot.index : slot.index + 1, :, start:end]) for array in arrays_of(slot)]


def written(tokens: int, seed: int) -> list[np.ndarray]:
    """What `fill` writes."""
    return [np.array(numbers(tokens, seed + number)) for number in range(2 * LAYERS)]


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (3, 64), (63, 65), (500, 12), (0, 512)])
def test_columns_of_one_slot_are_written_and_no_others(start: int, tokens: int) -> None:
    """In the array that everybody has, in more thread blocks than one and up to the last column."""
    slots = new_slots()
    others = [slots.take(1) for _ in range(3)]
    slot = others.pop(1)
    before = arrays_of(slot)
    fill(slots, slot, start, tokens, 1)
    assert all(one is other for one, other in zip(arrays_of(slot), before, strict=True))
    for got, wanted in zip(columns_of(slot, start, start + tokens), written(tokens, 1), strict=True):
        assert np.array_equal(got, wanted)
    for one, (begin, end) in [
        (slot, (0, start)),
        (slot, (start + tokens, 512)),
        *[(each, (0, 512)) for each in others],
    ]:
        assert not any(array.any() for array in columns_of(one, begin, end))


def test_columns_may_be_any_part_of_an_array() -> None:
    """As those of a block, or of another slot."""
    slots = new_slots()
    slot = slots.take(1)
    first, second = numbers(40, 1), numbers(40, 2)
    whole = mx.stack([first, second])
    key, value = slot.pool.keys[1], slot.pool.values[1]
    slots.storage.write([key, value], slot.index, 7, whole[..., 5:30, :])
    assert np.array_equal(np.array(key[:, :, 7:32]), np.array(first[:, :, 5:30]))
    assert np.array_equal(np.array(value[:, :, 7:32]), np.array(second[:, :, 5:30]))
    slots.storage.write([value], slot.index, 40, whole[1:, ..., :0, :])
    slots.storage.write([value], slot.index, 40, whole[1:, ..., :1, :])
    assert np.array_equal(np.array(value[:, :, 40]), np.array(second[:, :, 0]))
    for array in (key, value):
        assert not np.array(array[:, :, 32:40]).any()
        assert not np.array(array[:, :, 41:]).any()


@pytest.mark.parametrize("layers", [1, 32, 33])
def test_a_launch_takes_the_arrays_of_32_layers(
    request: pytest.FixtureRequest, kernels: str, layers: int
) -> None:
    """As the host pays for each: to clear a slot, to copy a prefix out of one, and to restore it to another."""
    if kernels != "plain_kernels":
        pytest.skip("launches are counted by what stands in for kernels")
    called: list[str] = request.getfixturevalue(kernels)
    slots = new_slots(layers)
    blocks = SlotBlocks(slots)
    slot, _ = slots.take(200), slots.take(200)
    launches = -(-2 * layers // ARRAYS_MAX)
    fill(slots, slot, 0, 130, 1)
    parts = blocks.take(slot, 0, [64, 128, 130])
    mx.eval(parts)
    assert called == ["write_columns"] * launches + ["read_columns"] * launches
    slot.close(is_finite=False)
    slots.take(1)
    assert not any(array.any() for array in columns_of(slot, 0, 512))
    restored = blocks.build(parts, 129, None, 200)
    assert called[2 * launches :] == ["write_columns"] * (2 * launches)
    for number, got in enumerate(columns_of(restored, 0, 129)):
        assert np.array_equal(got, np.array(numbers(130, 1 + number))[:, :, :129])


def test_a_pool_that_grows_keeps_what_was_written() -> None:
    """It is copied after the writes that were started before it, and written afterwards."""
    slots = new_slots()
    first = slots.take(1)
    fill(slots, first, 0, 20, 1)
    before = arrays_of(first)
    second = slots.take(1)
    assert not any(one is other for one, other in zip(arrays_of(first), before, strict=True))
    fill(slots, first, 20, 5, 10)
    fill(slots, second, 0, 30, 20)
    for slot, start, tokens, seed in ((first, 0, 20, 1), (first, 20, 5, 10), (second, 0, 30, 20)):
        for got, wanted in zip(columns_of(slot, start, start + tokens), written(tokens, seed), strict=True):
            assert np.array_equal(got, wanted)


def test_a_row_moves_to_a_larger_slot() -> None:
    """With its computed columns alone; its slot is free and cleared for the next row."""
    slots = new_slots()
    slot, beside = slots.take(500), slots.take(500)
    fill(slots, slot, 0, 512, 1)
    fill(slots, beside, 0, 512, 10)
    larger = slots.move(slot, 600, 510)
    assert (larger.capacity, larger.index) == (1024, 0)
    for got, wanted in zip(columns_of(larger, 0, 510), written(512, 1), strict=True):
        assert np.array_equal(got, wanted[:, :, :510])
    assert not any(array.any() for array in columns_of(larger, 510, 1024))
    reused = slots.take(1)
    assert reused.index == slot.index
    assert not any(array.any() for array in columns_of(reused, 0, 512))
    for got, wanted in zip(columns_of(beside, 0, 512), written(512, 10), strict=True):
        assert np.array_equal(got, wanted)


def test_a_row_is_restored_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are copies: the slot may be written again. An odd number of arrays is restored at once."""
    slots = new_slots()
    blocks = SlotBlocks(slots)
    slot = slots.take(1)
    fill(slots, slot, 0, 50, 1)
    parts = blocks.take(slot, 0, [16, 50])
    mx.eval(parts)
    fill(slots, slot, 0, 50, 20)
    monkeypatch.setattr(
        "zmqengine.engine.kv.block_layout.lots", lambda group, tokens: [(0, 1), (1, 3), (4, 2)]
    )
    restored = blocks.build(parts, 40, None, 600)
    assert restored.capacity == 1024
    for got, wanted in zip(columns_of(restored, 0, 40), written(50, 1), strict=True):
        assert np.array_equal(got, wanted[:, :, :40])
    assert not any(array.any() for array in columns_of(restored, 40, 1024))


@pytest.mark.parametrize(("dtype", "dim", "is_supported"), [(mx.float16, 64, True), (mx.float16, 4, False)])
def test_pieces_of_16_bytes_are_copied(dtype: mx.Dtype, dim: int, is_supported: bool) -> None:
    """A column of a head is a number of them."""
    assert supports(dtype, dim) is is_supported


def test_rows_keep_what_was_written_when_empty_slots_are_freed() -> None:
    """They move to new arrays, and are written there."""
    slots = new_slots()
    slot, other = slots.take(1), slots.take(1)
    slots.take(1)
    fill(slots, other, 0, 20, 1)
    slot.close(is_finite=True)
    slots.trim([])
    assert other.index in (0, 1)
    assert slots.empty_bytes == 0
    fill(slots, other, 20, 5, 10)
    for start, tokens, seed in ((0, 20, 1), (20, 5, 10)):
        for got, wanted in zip(columns_of(other, start, start + tokens), written(tokens, seed), strict=True):
            assert np.array_equal(got, wanted)
