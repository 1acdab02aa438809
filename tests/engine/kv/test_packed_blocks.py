"""Blocks in 8 bits: what they take, what they lose, and where they fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import finish, make_engine, runner_of
from tests.support.models import HYBRID, LLAMA, MAMBA, SLIDING, VOCAB_SIZE, build_model
from zmqengine.config import WorkerConfig
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.block_layout import all_finite
from zmqengine.engine.kv.eight_bits import group_size
from zmqengine.engine.kv.packed_blocks import PackedBlocks
from zmqengine.engine.load.probe import rows_of
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS
from zmqengine.engine.row import Row
from zmqengine.errors import ConfigError

KINDS = {"llama": LLAMA, "sliding": SLIDING, "mamba": MAMBA, "hybrid": HYBRID}
COUNT = 8


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def computed(runner: Any, prompt: list[int]) -> Row:
    """A row whose prompt is in its cache."""
    (row,) = rows_of([prompt])
    row.cache = runner.open(len(prompt))
    mx.eval(runner.forward([RowPiece(row, 0, len(prompt))], mx.array(prompt, mx.uint32), 1).marker)
    row.computed_tokens = len(prompt)
    return row


def generate(engine: Any, prompt: list[int], row: int = 0) -> tuple[list[int], int]:
    """The output, and how many tokens came from the prefix cache."""
    assert engine.insert([RowRequest(row, prompt, COUNT)]) == []
    run = finish(engine)
    return run.ids(row), run.cached(row)


def test_a_group_divides_the_head_dimension() -> None:
    """Where none does, an array stays as it is."""
    assert [group_size(dim) for dim in (128, 64, 96, 32, 80, 0)] == [64, 64, 32, 32, None, None]


@pytest.mark.parametrize("dim", [64, 32, 16])
def test_restored_keys_and_values_are_near_those_that_were_computed(dim: int) -> None:
    """Within half a step of 8 bits; those without a group are the same."""
    model = build_model({**LLAMA, "head_dim": dim})
    runner = runner_of(model)
    packed = PackedBlocks(runner.blocks)
    prompt = tokens(100)
    row = computed(runner, prompt)
    cuts = [64, 100]
    wide, narrow = runner.blocks.take(row.cache, 0, cuts), packed.take(row.cache, 0, cuts)
    taken = sum(array.nbytes for part in narrow for array in part)
    assert taken == 100 * packed.token_bytes
    if dim == 16:
        assert taken == sum(array.nbytes for part in wide for array in part)
    for part, restored in zip(wide, packed.wide(narrow), strict=True):
        for array, packed_array in zip(part, restored, strict=True):
            again = np.array(packed_array[0 : array.shape[0]].astype(mx.float32))
            exact = np.array(array.astype(mx.float32))
            spread = exact.max(axis=-1, keepdims=True) - exact.min(axis=-1, keepdims=True)
            assert (np.abs(again - exact) <= spread / 255 + 1e-6).all()


def test_sixteen_bits_take_nearly_half() -> None:
    """Of 128 numbers in bfloat16, 256 bytes, 136 are left."""
    model = build_model({**LLAMA, "head_dim": 128})
    model.set_dtype(mx.bfloat16)
    blocks = runner_of(model, "mlx-lm").blocks
    assert PackedBlocks(blocks).token_bytes / blocks.token_bytes == 136 / 256


def test_numbers_that_are_not_finite_are_seen_in_8_bits() -> None:
    """A NaN among others would leave no trace, and its block be used."""
    runner = runner_of(build_model({**LLAMA, "head_dim": 64}))
    packed = PackedBlocks(runner.blocks)
    for bad in (float("nan"), float("inf"), float("-inf")):
        layout: Any = _Layout(runner.blocks, bad)
        assert not all_finite(array for part in PackedBlocks(layout).take(None, 0, [64]) for array in part)
    row = computed(runner, tokens(64))
    assert all_finite(array for part in packed.take(row.cache, 0, [64]) for array in part)


class _Layout:
    """Blocks of noise with one bad number."""

    def __init__(self, layout: Any, bad: float) -> None:
        self.groups = layout.groups
        self.bad = bad

    def take(self, source: Any, start: int, cuts: list[int]) -> list[list[mx.array]]:
        array = mx.random.normal((2, 1, 2, cuts[0], 64))
        array[1, 0, 1, 5, 7] = self.bad
        return [[array] for _ in self.groups]


@pytest.mark.parametrize("shape", KINDS)
def test_a_conversation_goes_on_from_8_bits(shape: str) -> None:
    """As much is reused as without; states that are not cut are exact."""
    config = KINDS[shape]
    model = build_model({**config, **({"head_dim": 64} if "head_dim" in config else {})})
    prompt = tokens(50)
    engines = [make_engine(model, kv_bits=bits) for bits in (None, 8)]
    firsts = [generate(engine, prompt) for engine in engines]
    assert firsts[0] == firsts[1]
    longer = prompt + firsts[0][0] + tokens(10, 1)
    (wide, cached), (narrow, cached_too) = (generate(engine, longer, 1) for engine in engines)
    assert cached == cached_too == 50 + COUNT - 1
    assert len(narrow) == len(wide)
    if shape == "mamba":
        assert narrow == wide


def test_twice_as_many_tokens_fit() -> None:
    """Of prompts that come one after the other, into a cache of a few blocks."""
    model = build_model({**LLAMA, "head_dim": 64})
    wide = runner_of(model).blocks.token_bytes
    kept = []
    for bits in (None, 8):
        engine = make_engine(model, kv_bits=bits, prompt_cache_bytes=10 * BLOCK_TOKENS * (wide + 4))
        for row in range(60):
            generate(engine, tokens(BLOCK_TOKENS, row), row)
        kept.append(engine.stats().prompt_cache["blocks"])
    # float32: a quarter, scales and biases.
    assert kept[1] >= 2 * kept[0]


def test_blocks_on_disk_are_of_their_bits(tmp_path: Path) -> None:
    """Another engine in 8 bits finds them; one without sees none."""
    model = build_model({**LLAMA, "head_dim": 64})
    prompt = tokens(200)
    found = []
    for bits in (8, 8, None):
        engine = make_engine(model, kv_bits=bits)
        engine.keep_on_disk("a model", EngineOptions(cache_dir=str(tmp_path), cache_dir_free_bytes=0))
        assert engine.disk is not None
        plan = engine.disk.plan(np.array(prompt, np.uint32), engine.disk.salt(""))
        found.append(0 if plan is None else plan.tokens)
        if plan is not None:
            blocks = engine.disk.read(plan, np.array(prompt, np.uint32))
            engine.disk.restore(blocks, 1 << 30, "row")
        _, cached = generate(engine, prompt)
        assert cached >= found[-1] - 1
        engine.disk.close(60.0)
    assert found == [0, 192, 0]


def test_other_bits_are_refused() -> None:
    """By the flag."""
    with pytest.raises(ConfigError, match="--kv-bits is 4: it must be 8"):
        EngineOptions(kv_bits=4)
    with pytest.raises(ConfigError, match="--kv-bits is 9: it must be 8"):
        WorkerConfig(kv_bits=9)
