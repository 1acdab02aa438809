"""Layers on `CudaOps` write into KV caches in place what other layers write by MLX."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels
from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, make_engine, step
from tests.support.in_place import IN_PLACE, model_on_kernels
from tests.support.kv_kernels import MemoryKernels, device_kernels
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine import kv
from zmqengine.engine.cuda import attention, packed_attention
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest, Sampling, TextsRequest
from zmqengine.engine.kv import kv_batch
from zmqengine.engine.row import Row
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.engine.texts.pooling import Pooling

pytestmark = pytest.mark.cuda_emulated


@pytest.fixture(
    params=[
        pytest.param("plain", marks=pytest.mark.skipif(on_cuda(), reason="memory of a CUDA device")),
        pytest.param("kernels", marks=pytest.mark.skipif(not on_cuda(), reason="no CUDA device")),
    ]
)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels, and plain arithmetic in their place."""
    if request.param == "plain":
        cuda_kernels.stand_in(monkeypatch)
        yield
        cuda_kernels.forget()
    else:
        yield


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_in_place_is_what_a_cache_would_have(model_in_place, kernels, moves, seed):
    """Rows join, leave and go back, and are stepped by any width; only arrays that came out of a write are written to,
    and what was taken of them before stays as it was."""
    model, writes = model_in_place
    wanted = build_model(IN_PLACE)
    draw = random.Random(seed)
    batches = [kv.KVBatch(), kv.KVBatch()]
    taken: list[tuple[mx.array, np.ndarray]] = []
    for _ in range(160):
        kind = draw.random()
        count = len(batches[0])
        if not count or (kind < 0.2 and count < 5):
            text = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((3, 10, 20, 40, 40, 150)))]
            for place, one in enumerate((model, wanted)):
                alone = kv.new_caches(one)
                kv.prefill_row(one, alone, text)
                batches[place].join(kv.KVBatch.merge([alone], [len(text)], kernels))
        elif kind < 0.3:
            places = sorted(draw.sample(range(count), draw.randrange(1, count + 1)))
            places = batches[0].keep_rows(places)
            assert sorted(batches[1].keep_rows(places)) == sorted(places)
        elif kind < 0.4:
            array = batches[0].extract(0)[1].keys
            mx.eval(array)
            taken.append((array, np.array(array)))
        width = draw.choice((1, 1, 2, 5))
        inputs = mx.array([[draw.randrange(VOCAB_SIZE) for _ in range(width)] for _ in batches[0].lengths])
        logits = []
        for one, batch in zip((model, wanted), batches, strict=True):
            found = one(inputs, cache=batch.begin_step(inputs))
            batch.launch(found)
            logits.append(np.array(found))
        assert np.abs(logits[0] - logits[1]).max() < 1e-3
        assert batches[0].lengths == batches[1].lengths
        if width > 1:
            counts = [draw.randrange(width) for _ in batches[0].lengths]
            for batch in batches:
                batch.roll_back(counts)
    assert all(np.array_equal(np.array(array), before) for array, before in taken)
    assert len(taken) > 2
    # MLX writes only what a row brought into an empty batch.
    assert writes.count(True) > 20 * writes.count(False) > 0
    assert min(moves.count("within"), moves.count("into")) > 0


@pytest.fixture
def kernels() -> Any:
    """Those that move rows on this device, and note it."""
    if not on_cuda():
        return MemoryKernels(unused=math.nan)
    found: Any = device_kernels()
    own, found.moves = found.move_rows, []

    def noted(layers: Any, sources: Any, moves: Any) -> None:
        found.moves.append("within" if layers is sources else "into")
        own(layers, sources, moves)

    found.move_rows = noted
    return found


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> list[str]:
    """Rows that took the place of others, or an empty one, each time; of few rows most may be empty."""
    monkeypatch.setattr(kv_batch, "_UNUSED_SHARE_MAX", 0.8)
    return kernels.moves


@pytest.fixture
def model_in_place(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[bool]]:
    """A model whose layers write in place where they may, and whether they did, each time."""
    writes: list[bool] = []
    own = kv.RaggedKVCache.can_write_here

    def counted(self: Any, *given: Any) -> bool:
        writes.append(own(self, *given))
        return writes[-1]

    monkeypatch.setattr(kv.RaggedKVCache, "can_write_here", counted)
    return model_on_kernels(), writes


@pytest.fixture
def prompts_in_place(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> list[int]:
    """Has prompts of this model written in place, as those in half precision are; counts of the columns, each time."""
    if on_cuda():
        pytest.skip("tensor cores take no float32")
    counts: list[int] = []
    own = kv.RowKVCache.wrote_in_place

    def counted(self: Any, count: int, done: mx.array) -> bool:
        counts.append(count)
        return own(self, count, done)

    monkeypatch.setattr(attention, "by_tensor_cores", lambda dtype, dim: True)
    monkeypatch.setattr(kernels, "prompts_apart", 6)
    monkeypatch.setattr(kv.RowKVCache, "wrote_in_place", counted)
    return counts


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_prompts_in_half_precision_are_appended_in_place(dtype):
    model = model_on_kernels(dtype)
    caches = kv.new_caches(model)
    kv.prefill_row(model, caches, [1, 2, 3])
    assert [cache.can_write_here(5, dtype) for cache in caches] == [dtype == mx.float16] * len(caches)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Segments and texts of each packed step that attended together, 0 where each segment attended for itself."""
    counts: list[int] = []
    own = packed_attention.TracedPacked.step

    def counted(self: Any, segments: Any, tokens: int) -> Any:
        found = own(self, segments, tokens)
        counts.append(
            sum(1 if isinstance(width, int) else len(width) for _, width in segments) if found else 0
        )
        return found

    monkeypatch.setattr(packed_attention.TracedPacked, "step", counted)
    return counts


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("chunk", [512, 48])
@pytest.mark.parametrize("drafts", [None, "waiting"])
def test_prompts_that_begin_alike_do_not_write_into_each_other(
    prompts_in_place, model_in_place, kernels, moves, packed, chunk, drafts
):
    """Each appends to arrays of its own, in one chunk or several, after cached tokens or none; beside rows in decode,
    and verify blocks, they attend together."""
    check_tokens(model_in_place[0], kernels, drafts, prefill_chunk=chunk)
    layers = IN_PLACE["num_hidden_layers"]
    assert len(prompts_in_place) >= 16 * layers
    assert max(prompts_in_place) > 8
    assert sum(map(bool, packed)) >= 8


@pytest.mark.usefixtures("arithmetic", "prompts_in_place", "moves")
@pytest.mark.parametrize("together", [True, False])
def test_texts_beside_rows_in_decode_attend_together_with_these(
    model_in_place, kernels, packed, together, monkeypatch
):
    """However many, and their vectors are those of texts alone, also where each segment attends for itself."""
    if not together:
        monkeypatch.setattr(packed_attention, "SEGMENTS", 0)
    texts = [[7 + text, *range(20, 21 if text < 12 else 32 - text % 4)] for text in range(20)]
    wanted = vectors_of(make_engine(build_model(IN_PLACE)), texts)
    engine = make_engine(model_in_place[0], kernels=kernels, device=Device(is_gpu=True), prefill_ms=50)
    engine.insert([RowRequest(row, [5 + row, 9, 11], 500) for row in range(3)])
    for _ in range(20):
        engine.next()
    packed.clear()
    found = vectors_of(engine, texts)
    assert np.abs(found - wanted).max() < 1e-4
    # The pace begins with 16 tokens, which are 8 texts.
    assert max(packed) == (9 if together else 0)
    assert all(packed) == together
    assert engine._prefill.texts_caches == []


def vectors_of(engine: MlxEngine, texts: list[list[int]]) -> np.ndarray:
    """The vectors of `texts`, pooled from their last tokens."""
    engine.read_texts(Pooling("last", []), IN_PLACE["hidden_size"])
    engine.embed([TextsRequest(100, texts)])
    made: list[np.ndarray] = []
    while len(made) < len(texts):
        made += [vector for vectors in engine.next().vectors for vector in vectors.vectors]
    return np.stack(made)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("drafts", [None, "waiting"])
def test_an_engine_makes_the_same_tokens(model_in_place, kernels, moves, drafts):
    """Prompts that begin alike come and go, are parked and taken back, with windows of every width beside."""
    model, writes = model_in_place
    check_tokens(model, kernels, drafts)
    assert writes.count(True) > len(writes) / 2
    # The attention of steps and of verify blocks was traced.
    assert {width > 1 for _, width, kind in model._traces.calls if kind} == {False, bool(drafts)}
    assert min(moves.count("within"), moves.count("into")) > 0


def check_tokens(model: Any, kernels: Any, drafts: str | None, **options: Any) -> None:
    """Rows of an engine on `model` have the tokens that MLX's own operations give them."""
    # Of this one no greedy choice is so close that rounding could tip it.
    draw = random.Random(5)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(150)]
    rows = [
        RowRequest(
            row,
            shared[: draw.choice((0, 70, 150))]
            + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))],
            draw.randrange(10, 60),
            sampling=Sampling(temperature=0.8 * (row % 2)),
            seed=row,
        )
        for row in range(16)
    ]
    wanted = Run()
    plain = make_engine(build_model(IN_PLACE))
    plain.insert(rows)
    finish(plain, wanted)
    known = {(tuple(row.prompt), Row(row, VOCAB_SIZE, 2048).key): wanted.ids(row.row) for row in rows}
    engine = make_engine(
        model, kernels=kernels, speculator=speculator(Erring(known)) if drafts else None, **options
    )
    run = Run()
    for place, request in enumerate(rows):
        assert engine.insert([request]) == []
        for _ in range(draw.randrange(12)):
            step(engine, run)
        parked = draw.randrange(place + 1)
        if place % 3 == 2 and run.tokens.get(parked) and not run.ended(parked):
            engine.park(parked)
            step(engine, run)
            engine.insert([replace(rows[parked], emitted=run.ids(parked))])
    finish(engine, run)
    assert run.failures == []
    assert bool(run.drafts) == bool(drafts)
    assert {row.row: run.ids(row.row) for row in rows} == {row.row: wanted.ids(row.row) for row in rows}


@pytest.mark.usefixtures("arithmetic")
def test_one_that_came_last_takes_the_place_of_one_that_leaves_at_once(model_in_place, kernels, moves):
    """Before it has made a token: it is in the middle of the batch then, and those around it are under way."""
    model, _ = model_in_place
    penalties = Sampling(presence_penalty=1.0, frequency_penalty=0.5, logit_bias={7: 3.0})
    rows = [
        RowRequest(row, [row + 5] * (9 - row), 30, sampling=penalties if row != 2 else Sampling())
        for row in range(5)
    ]
    alone = Run()
    for row in rows:
        engine = make_engine(build_model(IN_PLACE))
        engine.insert([row])
        finish(engine, alone)
    engine, run = make_engine(model, kernels=kernels), Run()
    assert engine.insert(rows[:4]) == []
    for _ in range(6):
        step(engine, run)
    engine.remove([3])
    step(engine, run)
    assert engine.insert([rows[4]]) == []
    while engine.stats().rows_decoding < 4:
        step(engine, run)
    assert not run.tokens.get(4)
    engine.remove([0])
    assert moves[-2:] == ["into", "within"]
    finish(engine, run)
    assert {row: run.ids(row) for row in (1, 2, 4)} == {row: alone.ids(row) for row in (1, 2, 4)}
