"""Layers of the usual kind compute the same with fewer kernels, and write in place what caches would have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import llama

from tests.engine.test_traced_layers import WORDS, steps
from tests.support import plain_arithmetic
from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, make_engine, step
from tests.support.fused_models import FUSABLE, written_in_place
from tests.support.kv_kernels import MemoryKernels, device_kernels
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.engine import kv
from zmqengine.engine.autotune import layers, projections, tuning
from zmqengine.engine.cuda import between_products
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.kv import batch as kv_batch
from zmqengine.engine.row import Row

LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain arithmetic in place of the kernels."""
    plain_arithmetic.stand_in(monkeypatch)


@pytest.fixture(
    params=[
        pytest.param("plain", marks=pytest.mark.skipif(on_cuda(), reason="memory of a CUDA device")),
        pytest.param("kernels", marks=pytest.mark.skipif(not on_cuda(), reason="no CUDA device")),
    ]
)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, and plain arithmetic in their place."""
    if request.param == "plain":
        plain_arithmetic.stand_in(monkeypatch)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "config",
    [
        FUSABLE,
        {**FUSABLE, "rope_scaling": LLAMA_3_ROPE},
        {**FUSABLE, "model_type": "qwen3"},
        {**FUSABLE, "model_type": "qwen2", "hidden_size": 64 * LLAMA["num_attention_heads"]},
    ],
)
def test_fused_layers_compute_the_same(config):
    """Of the kinds that are most common: with biases, norms of heads, and frequencies of their own."""
    model = build_model(config)
    texts, widths = [[4, 5], [6, 7, 8, 9, 10], [11]], [1, 1, 3, 1]
    before = steps(model, texts, widths)
    projections.join_groups(model)
    layers.install(model, fuses=True)
    assert layers.count_fused(model) == 3
    for got, wanted in zip(steps(model, texts, widths), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4
    layers.uninstall(model)
    assert layers.count_fused(model) == 0


@pytest.mark.usefixtures("no_cuda")
def test_a_layer_of_another_kind_is_not_fused():
    """One whose members are others keeps its own code, also between two that are fused."""
    model = build_model({**FUSABLE, "num_hidden_layers": 4})
    projections.join_groups(model)
    model.layers[1].more = RMSNorm(128)
    texts = [[1, 2, 3], [4]]
    before = steps(model, texts, [1, 2])
    layers.install(model, fuses=True)
    assert layers.count_fused(model) == 3
    for got, wanted in zip(steps(model, texts, [1, 2]), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4
    layers.uninstall(model)
    yarn = {"rope_type": "yarn", "factor": 1.2, "original_max_position_embeddings": 64}
    others: list[dict[str, Any]] = [{"rope_traditional": True}, {"model_type": "qwen3", "rope_scaling": yarn}]
    for other, joins in ((FUSABLE, False), *(({**FUSABLE, **other}, True) for other in others)):
        model = build_model(other)
        if joins:
            projections.join_groups(model)
        layers.install(model, fuses=True)
        assert layers.count_fused(model) == 0


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_in_place_is_what_a_cache_would_have(model_in_place, kernels, moves, seed):
    """Rows join, leave and go back, and are stepped by any width; only arrays that came out of a write are written to,
    and what was taken of them before stays as it was."""
    model, writes = model_in_place
    wanted = build_model(FUSABLE)
    draw = random.Random(seed)
    batches = [kv.KVBatch(), kv.KVBatch()]
    taken: list[tuple[mx.array, np.ndarray]] = []
    for _ in range(160):
        kind = draw.random()
        count = len(batches[0])
        if not count or (kind < 0.2 and count < 5):
            text = [draw.randrange(WORDS) for _ in range(draw.choice((3, 10, 20, 40, 40, 150)))]
            for place, one in enumerate((model, wanted)):
                alone = kv.new_caches(one)
                kv.read_alone(one, alone, text)
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
        inputs = mx.array([[draw.randrange(WORDS) for _ in range(width)] for _ in batches[0].lengths])
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
    # A GPU's caches grow, and so are copied, more seldom.
    assert min(writes.count(True), writes.count(False)) > (10 if on_cuda() else 30)
    assert min(moves.count("within"), moves.count("into")) > 0


@pytest.fixture
def kernels() -> Any:
    """Those that move rows on this device, and note it."""
    if not on_cuda():
        return MemoryKernels()
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
    monkeypatch.setattr(kv_batch, "_EMPTY_ROWS_SHARE", 0.8)
    return kernels.moves


@pytest.fixture
def model_in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[bool]]]:
    """A model whose layers write in place where they may, and whether they did, each time."""
    writes: list[bool] = []
    own = kv.RaggedKVCache.can_write_here

    def counted(self: Any, *given: Any) -> bool:
        writes.append(own(self, *given))
        return writes[-1]

    monkeypatch.setattr(kv.RaggedKVCache, "can_write_here", counted)
    with written_in_place() as model:
        yield model, writes


@pytest.mark.usefixtures("no_cuda")
def test_a_kernel_that_does_not_work_leaves_layers_as_they_are(monkeypatch):
    """A device may refuse it: the model is served without."""

    def refused(*_: Any) -> Any:
        raise RuntimeError("too much shared memory")

    monkeypatch.setattr(between_products, "add_and_norm", refused)
    model = build_model(FUSABLE)
    projections.join_groups(model)
    assert tuning._fit_layers(model, 0, float("inf"), fuses=True).endswith(" 0 with fewer kernels")


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("activation", "fused"), [(silu, 3), (gelu, 0), (lambda gate: silu(gate) * 1.02, 0)])
def test_a_model_that_says_something_else_is_not_fused(monkeypatch, activation, fused):
    """What a layer's members do not tell is found out by comparing it."""
    monkeypatch.setattr(llama, "swiglu", lambda gate, up: activation(gate) * up)
    model = build_model(FUSABLE)
    projections.join_groups(model)
    told = tuning._fit_layers(model, 0, float("inf"), fuses=True)
    assert told.startswith("3 traced")
    assert layers.count_fused(model) == fused


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("drafts", [None, "waiting"])
def test_an_engine_makes_the_same_tokens(model_in_place, kernels, moves, drafts):
    """Prompts that begin alike come and go, are parked and taken back, with windows of every width beside."""
    model, writes = model_in_place
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
    plain = make_engine(build_model(FUSABLE))
    plain.insert(rows)
    finish(plain, wanted)
    known = {(tuple(row.prompt), Row(row, VOCAB_SIZE, 2048).key): wanted.ids(row.row) for row in rows}
    writes.clear()
    engine = make_engine(model, kernels=kernels, speculator=speculator(Erring(known)) if drafts else None)
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
    assert {row.row: run.ids(row.row) for row in rows} == {row.row: wanted.ids(row.row) for row in rows}
    assert writes.count(True) > len(writes) / 2
    assert min(moves.count("within"), moves.count("into")) > 0


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
        engine = make_engine(build_model(FUSABLE))
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
