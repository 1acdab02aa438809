"""Slots in 8 bits: tokens are those of attention over what the slots keep, whatever becomes of a row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, make_engine, once, runner_of, step
from tests.support.models import LLAMA, MAMBA, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.eight_bits import packed, widened
from zmqengine.engine.kv.slots import KVShape, Slots
from zmqengine.engine.load.kv_bits import with_kv_bits
from zmqengine.engine.models.attention import MlxAttention
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner, packed_shapes
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.seeds import seed_key
from zmqengine.worker.scheduler.memory_ledger import MemoryLedger

WIDE: dict[str, Any] = {**LLAMA, "num_hidden_layers": 4, "head_dim": 64}
CONTEXT = 2048
COUNT = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    # Two groups in a head, and windows.
    "windows": {**ARCHITECTURES["sliding window"], "head_dim": 128},
    # The last two layers read the keys and values of earlier ones.
    "shared layers": {**ARCHITECTURES["gemma4_text"], "head_dim": 32},
    "sinks": {**ARCHITECTURES["gpt_oss"], "head_dim": 64},
    "recurrent": {**ARCHITECTURES["qwen3_5"], "num_hidden_layers": 8, "head_dim": 32},
}


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


def model_of(models: dict[str, Any], name: str) -> Any:
    if name not in models:
        models[name] = build_model(FAMILIES[name])
    return models[name]


def in_8_bits(model: Any, kernels: Any = "auto") -> SlotRunner:
    runner = runner_of(model, kernels, CONTEXT)
    assert isinstance(runner, SlotRunner)
    return runner.in_8_bits()


class Rounded(MlxAttention):
    """Attention over wide slots, whose keys and values are rounded to 8 bits before they are written."""

    def attend(self, layout: Any, layer: int, qkv: Sequence[mx.array]) -> mx.array:
        heads = self._heads[layer]
        if not heads.reads_only and self._caches[layer] < max(self._caches):
            size = 64 if heads.dim % 64 == 0 else 32
            qkv = [qkv[0], *(widened(packed(numbers, size)) for numbers in qkv[1:])]
        return super().attend(layout, layer, qkv)


class RoundedOps(PlainOps):
    """Operations with that attention."""

    def attention(self, heads: Any, caches: Sequence[int]) -> MlxAttention:
        return Rounded(heads, caches)


def two_turns(engine: Any) -> list[list[int]]:
    """Outputs of rows that join one after the other, one of which outgrows its slot, and of their next turns."""
    run = Run()
    prompts = [tokens(30), tokens(505, 1), [*tokens(30), *tokens(60, 2)], tokens(3, 3)]
    for turn in (0, 10):
        for place, prompt in enumerate(prompts):
            row = turn + place
            turns = prompt if not turn else [*prompt, *run.ids(place), *tokens(5, 4)]
            assert engine.insert([RowRequest(row, turns, COUNT)]) == []
            step(engine, run)
        finish(engine, run)
    assert run.failures == []
    assert engine.stats().cached_tokens > 500
    return [run.ids(turn + place) for turn in (0, 10) for place in range(len(prompts))]


@pytest.mark.parametrize(
    ("family", "kernels"), [("llama", "auto"), ("windows", "auto"), *((name, "mlx") for name in FAMILIES)]
)
def test_tokens_are_those_of_attention_over_what_is_kept(
    models: dict[str, Any], family: str, kernels: str
) -> None:
    """Rows join, move to larger slots, and go on from the prefix cache."""
    model = model_of(models, family)
    runner = in_8_bits(model, kernels)
    assert runner.slots.shapes[0].group_size
    assert not runner.slots.shapes[-1].group_size

    def wanted() -> list[list[int]]:
        weights = runner_of(model, "mlx", CONTEXT).decoder.weights
        return two_turns(make_engine(SlotRunner(DecoderModel(weights, RoundedOps()), CONTEXT)))

    assert two_turns(make_engine(runner, kv_bits=8)) == once(model, "rounded", wanted)


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_a_row_makes_the_same_tokens_whatever_becomes_of_it(
    models: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    """Alone and beside others, with drafts that are wrong, parked and resumed, from memory and from disk."""
    model = model_of(models, "llama")
    rows = [RowRequest(row, tokens(20 + 45 * row, row), 12) for row in range(4)]
    wanted = {}
    for row in rows:
        engine = make_engine(in_8_bits(model, kernels), kv_bits=8)
        assert engine.insert([row]) == []
        wanted[row.row] = finish(engine).ids(row.row)
    erring = Erring({(tuple(row.prompt), seed_key(row.seed)): wanted[row.row] for row in rows})
    engine = make_engine(in_8_bits(model, kernels), kv_bits=8, speculator=speculator(erring))
    engine.keep_on_disk("a model", EngineOptions(cache_dir=str(tmp_path), cache_dir_free_bytes=0))
    run = Run()
    for row in rows:
        assert engine.insert([row]) == []
        step(engine, run)
    before = run.ids(2)
    assert engine.park(2) > 0
    step(engine, run)
    assert engine.insert([replace(rows[2], row=12, emitted=before)]) == []
    finish(engine, run)
    assert run.drafts
    assert before + run.ids(12) == wanted[2]
    assert [run.ids(row) for row in (0, 1, 3)] == [wanted[row] for row in (0, 1, 3)]
    # The whole prompt but its last token is cached.
    assert engine.insert([replace(rows[3], row=20)]) == []
    finish(engine, run)
    assert run.ids(20) == wanted[3]
    assert run.cached(20) == len(rows[3].prompt) - 1
    assert engine.disk is not None
    engine.disk.close(60.0)

    again = make_engine(in_8_bits(model, kernels), kv_bits=8)
    again.keep_on_disk("a model", EngineOptions(cache_dir=str(tmp_path), cache_dir_free_bytes=0))
    assert again.disk is not None
    prompt = np.array(rows[3].prompt, np.uint32)
    plan = again.disk.plan(prompt, again.disk.salt(""))
    assert plan is not None
    again.disk.restore(again.disk.read(plan, prompt), 1 << 30, "row")
    assert again.insert([rows[3]]) == []
    restored = finish(again)
    assert restored.cached(3) == plan.tokens > 64
    assert restored.ids(3) == wanted[3]
    again.disk.close(60.0)


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_bytes_are_those_of_the_arrays_and_twice_as_many_tokens_are_admitted(
    models: dict[str, Any], kernels: Any
) -> None:
    """Of three layers 9 bits of 32 are left, the last keeps all."""
    model = model_of(models, "llama")
    admitted = []
    for runner in (runner_of(model, kernels, CONTEXT), in_8_bits(model, kernels)):
        engine = make_engine(runner)
        assert engine.insert([RowRequest(0, tokens(600), 4)]) == []
        while not engine.stats().rows_decoding:
            engine.next()
        (pool,) = (pool for pool in runner.slots.pools.values() if pool.used)
        arrays = [
            part
            for array in (*pool.keys, *pool.values)
            for part in (array if isinstance(array, tuple) else (array,))
        ]
        held = sum(array.nbytes for array in arrays) // pool.rows
        assert engine.memory().kv == held == engine.project_bytes(604)
        ledger = MemoryLedger(engine, limit_bytes=1 << 28, prompt_cache_share=0)
        admitted.append(ledger.kv_bytes_max // engine.project_bytes(1000))
    assert runner.blocks.token_bytes / runner_of(model).blocks.token_bytes == (3 * 9 / 32 + 1) / 4
    assert admitted[1] >= 2 * admitted[0] > 0


def test_of_16_bits_nearly_half_is_left() -> None:
    """Of a model with 32 layers, as many as one of 8B parameters has."""
    shapes = [KVShape(8, 128, mx.bfloat16)] * 32
    wide, narrow = Slots(shapes, CONTEXT), Slots(packed_shapes(shapes), CONTEXT)
    assert narrow.project_bytes(1000) == (31 * 136 / 256 + 1) / 32 * wide.project_bytes(1000)


def test_it_is_said_what_8_bits_gain(models: dict[str, Any]) -> None:
    """Slots keep all bits where nothing else can be read; what runs is told by name."""
    model = model_of(models, "llama")
    runner, said = with_kv_bits(runner_of(model), "a llama", is_gpu=False)
    assert "in slots and at rest, 46% of the bytes" in said
    assert isinstance(runner, SlotRunner)
    assert runner.slots.shapes[0].group_size
    hybrid = runner_of(model_of(models, "recurrent"))
    assert with_kv_bits(hybrid, "a hybrid", is_gpu=False)[1].endswith("recurrent states as they were")

    kernels = SlotRunner(
        DecoderModel(runner_of(model, "mlx").decoder.weights, PlainOps(attention_is_fused=False)), 9
    )
    halves = build_model(WIDE)
    halves.set_dtype(mx.bfloat16)
    kept = {
        "the model's own code": runner_of(model, "mlx-lm"),
        "kernels": kernels,
        "slow but in float32": runner_of(halves),
        "no layer but the last": runner_of(build_model({**WIDE, "num_hidden_layers": 1})),
    }
    for reason, wide in kept.items():
        same, said = with_kv_bits(wide, "a model", is_gpu=False)
        assert same is wide
        assert said.startswith("8 bits at rest only")
        assert reason in said
    for config in (LLAMA, MAMBA):
        assert "gain nothing" in with_kv_bits(runner_of(build_model(config)), "a model", is_gpu=False)[1]


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_a_number_that_is_not_finite_is_seen(models: dict[str, Any], kernels: str) -> None:
    """In its group's scale; the slot is cleared before its next row."""
    runner = in_8_bits(model_of(models, "llama"), kernels)
    slot = runner.open(10)
    bad = mx.full((1, 1, 2, 1, 64), 1.0)
    bad[..., 5] = mx.nan
    parts = packed(bad, 64)
    names = [[(0, f"keys {part}")] for part in ("numbers", "scales", "biases")]
    for name, part in zip(names, parts, strict=True):
        runner.slots.restore(slot, name, part)
    assert not np.isfinite(np.array(runner.slots.copy(slot, names[1], 0, 1))).all()
    slot.close(is_finite=False)
    again = runner.open(10)
    for name in names:
        assert not np.array(runner.slots.copy(again, name, 0, 1)).any()
