"""The kernel for Metal: its text, run on the CPU, attends as MLX's operations do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_on_cpu, metal_on_cpu
from tests.support.engines import finish, make_engine
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.bench.device import kernels
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.slots import KVShape, Slots
from zmqengine.engine.load import open_model as opening
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.metal import slot_attention
from zmqengine.engine.metal.metal_ops import MetalOps
from zmqengine.engine.metal.slot_attention import MetalAttention, heads_together
from zmqengine.engine.models.attention import WIDTH_MAX, MlxAttention, PlacedPiece
from zmqengine.engine.models.layers import HeadShape
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.open import find_ops
from zmqengine.errors import ConfigError

CONTEXT = 2048


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's text on the CPU; the names of the kernels that are called."""
    if not cuda_on_cpu.COMPILER:
        pytest.skip("g++ is not installed")
    slot_attention._kernel.cache_clear()
    yield metal_on_cpu.stand_in(monkeypatch)
    slot_attention._kernel.cache_clear()


@dataclass(frozen=True)
class Tokens:
    """The next `count` tokens of a row that has `computed`, in a slot of `capacity`."""

    computed: int
    count: int
    capacity: int = 512


STEPS = {
    "rows in decode of unlike lengths": [Tokens(0, 1), Tokens(1, 1), Tokens(39, 1), Tokens(300, 1)],
    "verify blocks of unlike widths": [Tokens(5, 3), Tokens(60, 8), Tokens(31, 1), Tokens(0, 6)],
    "prompts beside them, in several pools": [
        Tokens(20, 1), Tokens(0, 30), Tokens(3, 4), Tokens(9, 1, 1024), Tokens(0, 25, 1024), Tokens(2, 1, 2048),
    ],
    "prompts alone": [Tokens(0, 9), Tokens(7, 40)],
}  # fmt: skip


def numbers(shape: Sequence[int], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def shape_of(
    dim: int, dtype: mx.Dtype = mx.float16, heads: int = 6, key_heads: int = 2, **more: Any
) -> HeadShape:
    return HeadShape(heads, key_heads, dim, dim**-0.5, None, None, None, dtype)._replace(**more)


SHAPES = {
    "64 dimensions": shape_of(64),
    "80 dimensions, each head its keys": shape_of(80, heads=3, key_heads=3),
    "96 dimensions, one head of keys": shape_of(96, mx.bfloat16, heads=5, key_heads=1),
    "128 dimensions": shape_of(128, mx.bfloat16, heads=16),
    "256 dimensions, heads of a group in two threadgroups": shape_of(256, heads=8, key_heads=1),
    "window": shape_of(64, window=20),
    "sinks": shape_of(64, sinks=numbers((6,), 3, mx.float16), window=33),
    "sinks of all columns": shape_of(64, mx.bfloat16, sinks=numbers((6,), 3, mx.bfloat16)),
    "capped scores": shape_of(128, cap=2.0),
}


def host(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def attended(
    attention: MlxAttention, heads: HeadShape, step: Sequence[Tokens], padding: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """What the step's tokens get, and the slots afterwards. Columns that no row has are not numbers."""
    slots = Slots([KVShape(heads.key_heads, heads.dim, heads.dtype)], CONTEXT)
    pieces = [PlacedPiece(slots.take(each.capacity), each.computed, each.count) for each in step]
    for number, piece in enumerate(pieces):
        pool = piece.slot.pool
        for seed, arrays in enumerate((pool.keys, pool.values)):
            columns = numbers((heads.key_heads, pool.capacity, heads.dim), 2 * number + seed, heads.dtype)
            computed = mx.arange(pool.capacity)[:, None] < piece.start
            # MLX's attention masks the columns that it reads too many, and so does that of prompts.
            others = (
                float("nan") if isinstance(attention, MetalAttention) and piece.count <= WIDTH_MAX else 0.0
            )
            arrays[0][piece.slot.index] = mx.where(computed, columns, mx.array(others, heads.dtype))
    count = sum(each.count for each in step)
    qkv = [
        mx.pad(numbers((count, each, heads.dim), 90, heads.dtype), [(0, padding), (0, 0), (0, 0)])
        for each in (heads.heads, heads.key_heads, heads.key_heads)
    ]
    result = attention.attend(attention.begin(pieces, count + padding), 0, qkv)
    after = [array for pool in slots.pools.values() for array in (pool.keys[0], pool.values[0])]
    return host(result)[:count], list(map(host, after))


@pytest.mark.cuda_emulated
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_attend_as_by_mlx(kernel: list[str], shape: str, step: str) -> None:
    """To the columns that they see, in one call whatever the pools; slots are written by MLX."""
    heads = SHAPES[shape]
    wanted, columns = attended(MlxAttention([heads], [0]), heads, STEPS[step])
    got, after = attended(MetalAttention([heads], [0]), heads, STEPS[step], padding=3)
    assert kernel == ([] if step == "prompts alone" else ["slot_attention"])
    assert np.abs(got - wanted).max() < (0.01 if heads.dtype == mx.float16 else 0.05)
    for one, other in zip(after, columns, strict=True):
        assert np.array_equal(one[np.isfinite(one)], other[np.isfinite(one)])


def test_a_layer_that_reads_keys_of_an_earlier_one_writes_none(kernel: list[str]) -> None:
    """As in Gemma 4."""
    heads = shape_of(64)
    step = STEPS["verify blocks of unlike widths"]
    slots = Slots([KVShape(2, 64, mx.float16)], CONTEXT)
    pieces = [PlacedPiece(slots.take(each.capacity), each.computed, each.count) for each in step]
    attend = MetalAttention([heads, heads._replace(reads_only=True)], [0, 0])
    layout = attend.begin(pieces, 18)
    qkv = [numbers((18, each, 64), 90, mx.float16) for each in (6, 2, 2)]
    first, second = (host(attend.attend(layout, layer, given)) for layer, given in enumerate((qkv, qkv[:1])))
    assert np.array_equal(first, second)


def test_the_report_times_kernels_and_finds_wrong_ones(
    kernel: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that MLX does not compile is a finding, too. Without Metal there is a line without figures."""
    (none,) = kernels.check(tmp_path)
    assert (none.ok, none.figures) == (None, {})
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "CASES", (kernels.KernelCase(2, 20, 3),) * 2)
    monkeypatch.setattr(kernels, "HEADS", {"128 dimensions": shape_of(128, mx.bfloat16)})
    monkeypatch.setattr(kernels, "_REPEATS", 1)
    right, _ = kernels.check(tmp_path)
    assert right.ok, right.text
    assert list(right.figures) == ["us of MLX's operations", "us of the kernel", "off by"]

    def zeros(heads: HeadShape, queries: mx.array, table: mx.array, *_: Any) -> mx.array:
        if not kernel.pop():
            raise RuntimeError("program_source:3:1: error: use of undeclared identifier")
        return mx.zeros((table.shape[0], heads.heads * heads.dim), heads.dtype)

    kernel[:] = ["", "zeros"]
    monkeypatch.setattr(slot_attention, "attend_short", zeros)
    wrong, broken = kernels.check(tmp_path)
    assert (wrong.ok, wrong.figures["off by"]) == (False, 1)
    assert (broken.ok, "undeclared identifier" in broken.text) == (False, True)


def test_heads_of_a_threadgroup_fit_its_registers() -> None:
    """All heads with the same keys, or a part of them that divides them."""
    expected = {(1, 256): 1, (7, 64): 7, (8, 128): 8, (8, 256): 4, (5, 256): 1, (16, 80): 8}
    assert {each: heads_together(*each) for each in expected} == expected


def test_heads_without_a_kernel_are_left_to_mlx() -> None:
    """All layers, if one is of such a kind."""
    assert isinstance(MetalOps().attention([shape_of(64)], [0]), MetalAttention)
    for unlike in (shape_of(64, mx.float32), shape_of(112)):
        assert type(MetalOps().attention([shape_of(64), unlike], [0, 1])) is MlxAttention


def half_model(**changes: Any) -> Any:
    model = build_model({**LLAMA, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, **changes})
    model.set_dtype(mx.float16)
    return model


@pytest.mark.cuda_emulated
def test_an_engine_makes_the_same_tokens(kernel: list[str]) -> None:
    """Opened as on a Mac with `--kernels metal`: compared first, then rows together, with prefixes of each other."""
    model = half_model()
    opened = open_model(model, MetalOps(), PlainOps(), context_tokens=CONTEXT)
    assert opened.facts["model_code"] == "ours"
    compared = len(kernel)
    assert compared > 0
    prompts = [[(7 * row + at * at) % VOCAB_SIZE for at in range(20 + 9 * row)] for row in range(4)]
    # In half precision later tokens of a random model differ by rounding.
    requests = [RowRequest(row, prompt, 4) for row, prompt in enumerate(prompts)]
    outputs = []
    for runner in (opened.runner, open_model(model, PlainOps(), PlainOps(), context_tokens=CONTEXT).runner):
        engine = make_engine(runner, context_tokens=CONTEXT)
        assert engine.insert(requests) == []
        run = finish(engine)
        outputs.append([run.ids(row) for row in range(4)])
    assert outputs[0] == outputs[1]
    assert len(kernel) > compared


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_differs_at_the_start_is_not_used(
    kernel: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """MLX's operations run the model, and a warning says so."""

    def attend_wrong(heads: HeadShape, queries: mx.array, table: mx.array, *_: Any) -> mx.array:
        if fault == "raises":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return mx.ones((table.shape[0], heads.heads * heads.dim), heads.dtype)

    monkeypatch.setattr(slot_attention, "attend_short", attend_wrong)
    warnings: list[str] = []
    monkeypatch.setattr(opening.log, "warning", lambda text, **_: warnings.append(text))
    opened = open_model(half_model(), MetalOps(), PlainOps())
    assert "with MLX's operations" in opened.facts["model_code"]
    assert any("differ from the reference" in each for each in warnings)


def test_the_kernels_are_off_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And refused where there is no Metal."""
    monkeypatch.setattr("zmqengine.engine.open.on_gpu", lambda: True)
    monkeypatch.setattr("zmqengine.engine.open.on_cuda", lambda: False)
    assert [type(ops) for ops in find_ops("auto")] == [PlainOps, PlainOps]
    with pytest.raises(ConfigError, match="no Metal"):
        find_ops("metal")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert [type(ops) for ops in find_ops("metal")] == [MetalOps, PlainOps]
    assert [type(ops) for ops in find_ops("mlx")] == [PlainOps, PlainOps]
