"""The rules of writing in place hold in engines of every kind of model, and a mistake against them is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import Run, finish, greedy, make_engine, step
from tests.support.kv_kernels import MemoryKernels, write_in_place
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.engine import kv
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv import kv_batch

pytestmark = pytest.mark.skipif(on_cuda(), reason="memory of a CUDA device")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> MemoryKernels:
    """Kernels that move rows, of which most may be empty, in batches whose layers write in place."""
    monkeypatch.setattr(kv_batch, "_UNUSED_SHARE_MAX", 0.8)
    write_in_place(monkeypatch)
    return MemoryKernels(gpu=True)


def stepped(model: Any, kernels: MemoryKernels, lengths: tuple[int, ...] = (9, 5, 12, 7)) -> kv.KVBatch:
    """A batch that was stepped once by MLX and once in place, of rows of these lengths before."""
    rows = []
    for row, length in enumerate(lengths):
        rows.append(kv.new_caches(model))
        kv.prefill_row(model, rows[-1], [1 + row * 7 + place for place in range(length)])
    batch = kv.KVBatch.merge(rows, lengths, kernels)
    for _ in range(2):
        batch.launch(logits(model, batch))
    return batch


def logits(model: Any, batch: kv.KVBatch) -> mx.array:
    inputs = mx.array([[row] for row in range(1, 1 + len(batch))])
    found: mx.array = model(inputs, cache=batch.begin_step(inputs))
    return found


def copied(model: Any, batch: kv.KVBatch, place: int) -> list[mx.array]:
    """A copy of a row for the prefix cache, not computed yet."""
    first = kv.new_caches(model)
    kv.prefill_row(model, first, [1])
    return kv.BlockLayout(first).take(batch.row(place), 0, [batch.lengths[place]])[0]


def test_a_copy_is_what_the_row_was_when_another_has_taken_its_place(model, kernels):
    """The batch starts copies before rows move."""
    batch = stepped(model, kernels)
    wanted = [np.array(array) for array in copied(model, stepped(model, kernels), 0)]
    found = copied(model, batch, 0)
    assert batch.keep_rows([1, 2, 3]) == [3, 1, 2]
    assert kernels.moves == ["within"]
    batch.launch(logits(model, batch))
    for array, before in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.array(array), before)


@pytest.mark.parametrize("empty_bytes_max", [0, 1 << 30])
def test_a_small_batch_keeps_the_places_of_rows_that_left(model, kernels, monkeypatch, empty_bytes_max):
    """And one to spare, so that rows come and go without a copy of the others."""
    monkeypatch.setattr(kv_batch, "_UNUSED_SHARE_MAX", 1 / 4)
    kernels.empty_bytes_max = empty_bytes_max
    copies: list[int] = []
    repack = kernels.repack

    def noted(layer: Any, order: mx.array, rows: int) -> Any:
        copies.append(rows)
        return repack(layer, order, rows)

    monkeypatch.setattr(kernels, "repack", noted)
    batch = stepped(model, kernels)
    layers = len(batch.caches)
    for _ in range(3):
        batch.keep_rows([0, 2])
        batch.launch(logits(model, batch))
        for length in (9, 5):
            batch.join(stepped(model, kernels, (length,)))
            batch.launch(logits(model, batch))
    rows = copies[::layers]
    assert rows == ([] if empty_bytes_max else [2, 3, 4] * 3)
    batch.join(stepped(model, kernels, (8,)))
    assert copies[::layers][len(rows) :] == [6 if empty_bytes_max else 5]


def test_arrays_that_a_copy_replaced_are_freed_once_the_device_has_read_them(model, kernels, monkeypatch):
    """The step in flight when the batch is copied has not waited for the copy; the next one has, and MLX's thread drops
    its references after that."""
    freed: list[int] = []
    free = kernels.free

    def noted(layers: list[Any]) -> None:
        freed.append(sum(array.nbytes for layer in layers for array in layer))
        free(layers)

    monkeypatch.setattr(kv_batch, "_UNUSED_SHARE_MAX", 1 / 4)
    monkeypatch.setattr(kernels, "free", noted)
    batch = stepped(model, kernels)
    replaced = sum(array.nbytes for layer in batch.caches for array in layer.all_rows())
    batch.keep_rows([0])
    mx.eval(logits(model, batch))
    before = mx.get_active_memory()
    while batch.has_replaced:
        batch.landed()
    assert freed == [0, 0, replaced]
    assert before - mx.get_active_memory() >= replaced


@pytest.mark.parametrize("together", [False, True])
def test_copies_of_rows_have_few_sizes(model, monkeypatch, together):
    """So that MLX's freed buffers are reused on a GPU; on a CPU nothing is copied in vain."""
    sizes: dict[bool, set[int]] = {}
    concatenate = mx.concatenate
    for gpu in (False, True):
        found = sizes.setdefault(gpu, set())

        def noted(arrays: list[mx.array], axis: int = 0, found: set[int] = found) -> mx.array:
            made = concatenate(arrays, axis)
            found.add(made.shape[-2])
            return made

        for length in range(30, 60):
            batch = stepped(model, MemoryKernels(gpu=gpu), (70, length, length))
            names = [(index, name) for index in range(len(batch.caches)) for name in ("keys", "values")]
            rows = batch.leaving([1, 2] if together else [1])
            monkeypatch.setattr(mx, "concatenate", noted)
            cut = rows[1].cut(names, 0, length)
            monkeypatch.undo()
            assert cut.shape[-2] == length
            for array, (index, name) in zip(cut, names, strict=True):
                whole = getattr(batch.caches[index], name)
                start = batch.layout.columns - batch.lengths[1]
                assert mx.array_equal(array, whole[1:2, :, start : start + length])
    assert len(sizes[False]) == 30
    assert len(sizes[True]) <= 5


def test_a_move_before_the_copies_are_started_is_found(model, kernels, monkeypatch):
    """Planted: a row takes the place of one whose copies for the prefix cache wait."""
    batch = stepped(model, kernels)
    copied(model, batch, 0)
    monkeypatch.setattr(kv.KVBatch, "start_copies", lambda self: None)
    with pytest.raises(AssertionError, match=r"row 0, column .* written before a copy"):
        batch.keep_rows([1, 2, 3])


def test_a_join_before_the_copies_are_started_is_found(model, kernels, monkeypatch):
    """Planted: the same for a row that joins in an empty place, where a copy still reads the row that has left."""
    batch = stepped(model, kernels)
    copied(model, batch, 3)
    monkeypatch.setattr(kv.KVBatch, "start_copies", lambda self: None)
    assert batch.keep_rows([0, 1, 2]) == [0, 1, 2]
    with pytest.raises(AssertionError, match=r"row 3, column .* written before a copy"):
        batch.join(stepped(model, kernels, (4,)))


def test_a_move_before_the_step_is_started_is_found(model, kernels):
    """Planted: rows move while a step that reads them is built and not started."""
    batch = stepped(model, kernels)
    logits(model, batch)
    with pytest.raises(AssertionError, match=r"row 0, column .* written before a step"):
        batch.keep_rows([1, 2, 3])


@pytest.mark.parametrize(
    "change", [lambda batch: batch.keep_rows([1, 2, 3]), lambda batch: batch.keep_rows([3])]
)
def test_a_read_of_a_moved_row_is_found(model, kernels, change: Callable[[kv.KVBatch], Any]):
    """Planted: a row is named before the batch changes and copied afterwards."""
    batch = stepped(model, kernels)
    first = kv.new_caches(model)
    kv.prefill_row(model, first, [1])
    moved = batch.row(3)
    change(batch)
    with pytest.raises(AssertionError, match="after rows have moved"):
        kv.BlockLayout(first).take(moved, 0, [5])


def test_a_step_that_was_not_begun_is_found(model, kernels):
    """A model that is called without `begin_step` would write where the step before has."""
    batch = stepped(model, kernels)
    batch.roll_back([1] * 4)
    with pytest.raises(AssertionError, match="begun by KVBatch"):
        model(mx.array([[1]] * 4), cache=batch.caches)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v2"])
def test_engines_make_the_same_tokens_in_place(kernels, kind):
    """Rows come, go, are parked and begin like others, in models whose layers know nothing of it."""
    from zmqengine.bench.models.small_models import ARCHITECTURES

    model = build_model(ARCHITECTURES.get(kind, LLAMA))
    draw = random.Random(3)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [
        shared[: draw.choice((0, 70, 150))]
        + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
        for _ in range(12)
    ]
    engine, run = make_engine(model, kernels=kernels), Run()
    limits = [draw.randrange(5, 30) for _ in prompts]
    for row, prompt in enumerate(prompts):
        assert engine.insert([RowRequest(row, prompt, limits[row])]) == []
        for _ in range(draw.randrange(8)):
            step(engine, run)
    finish(engine, run)
    assert run.failures == []
    for row, prompt in enumerate(prompts):
        assert run.ids(row) == greedy(model, prompt, limits[row])
    assert min(kernels.moves.count("within"), kernels.moves.count("into")) > 0
    assert engine.stats().cached_tokens > 0


def test_a_rewound_cache_has_its_room_and_depends_on_no_write():
    """However often texts were written into it: else the arrays of all of them would stay. MLX's own write ends it."""
    keys, values = mx.zeros((1, 2, 64, 8)), mx.ones((1, 2, 64, 8))
    cache = kv.RowKVCache()
    cache.own(keys, values)
    for _ in range(3):
        assert kv.rewound([cache]) == [cache]
        assert (cache.offset, cache.room, kv.room([cache])) == (0, 64, 64)
        assert cache.keys is keys
        assert cache.values is values
        cache.wrote_in_place(40, keys + 1)
        assert (cache.offset, cache.room) == (40, 64)
        assert cache.keys is not keys
    assert kv.room([cache, kv.RowKVCache()]) == kv.room([]) == 0
    cache.update_and_fetch(keys[..., :1, :], values[..., :1, :])
    assert kv.rewound([cache]) == []
    assert kv.room([cache]) == 0
