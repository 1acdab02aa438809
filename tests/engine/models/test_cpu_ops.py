"""Operations for a CPU compute what MLX's do, and weights are in memory once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.models.families import FAMILY
from tests.engine.models.test_decoder import alike, steps
from tests.support.models import build_model
from zmqengine.engine.models.cpu_math import exp_minus, gelu, gelu_tanh, silu
from zmqengine.engine.models.cpu_ops import CpuOps
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import HeadShape, RotaryEmbedding, read_weights
from zmqengine.engine.models.mlx_lm import KVCache, create_causal_mask
from zmqengine.engine.models.ops import PlainOps

HEADS = HeadShape(4, 2, 8, 8**-0.5, RotaryEmbedding(8, False, 1e4, 1.0, None, 1.0), None, None, mx.float32)
ROWS = 3
WIDE = [-1e4, -40.0, 0.0, 40.0, 1e4]


def attended(ops: Any, before: int, width: int, mask: Any) -> mx.array:
    """Attention of the last `width` tokens of rows that have `before` others."""
    cache: Any = KVCache()  # type: ignore[no-untyped-call]
    draw = mx.random.key(3)
    keys, values = (mx.random.normal((ROWS, 2, before + width, 8), key=draw) for _ in range(2))
    cache.update_and_fetch(keys[:, :, :before], values[:, :, :before])
    queries = 3 * mx.random.normal((ROWS, 4, width, 8), key=draw)
    found: mx.array = ops.attend((queries, keys[:, :, before:], values[:, :, before:]), HEADS, 0, cache, mask)
    return found


@pytest.mark.parametrize("width", [1, 3, 9, 150])
@pytest.mark.parametrize("kind", ["causal", "of rows", "of all", "none"])
def test_attention_is_that_of_mlx(width: int, kind: str) -> None:
    """Decode steps, and prompts of one and of several blocks, with each kind of mask that caches make."""
    before = 70
    masks: dict[str, Any] = {"causal": "causal", "none": None}
    masks["of rows"] = create_causal_mask(width, offset=before, left_padding=mx.array([0, 5, 60]))
    masks["of all"] = create_causal_mask(width, offset=before, window_size=40)
    wanted, got = (attended(ops, before, width, masks[kind]) for ops in (PlainOps(), CpuOps()))
    assert alike(got, wanted)


def test_a_token_that_sees_nothing_is_a_number() -> None:
    """Padding is read by later layers, where a NaN would reach the columns that count."""
    for width in (2, 20):
        nothing = mx.zeros((ROWS, 1, width, 10 + width), mx.bool_)
        assert bool(mx.isfinite(attended(CpuOps(), 10, width, nothing)).all())


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    """As with MLX's operations: its logits tell, and the other rows go on."""
    cache: Any = KVCache()  # type: ignore[no-untyped-call]
    states = mx.ones((2, 2, 20, 8)).at[1].multiply(float("nan"))
    found = CpuOps().attend((mx.repeat(states, 2, axis=1), states, states), HEADS, 0, cache, "causal")
    assert np.isfinite(np.array(found)).all(axis=(1, 2, 3)).tolist() == [True, False]


def test_exp_and_silu_are_those_of_numpy() -> None:
    """To a millionth, at the ends of the range too; NaN stays NaN. Gradients are numbers everywhere: models are trained
    with them."""
    numbers = np.linspace(0, 90, 9001)
    values = mx.array(numbers.astype(np.float32))
    assert np.abs(np.array(exp_minus(values)) - np.exp(-numbers)).max() < 1e-6
    assert (np.array(exp_minus(mx.array([1e30, np.inf]))) < 1e-30).all()
    for function, places in ((exp_minus, [0, 40, np.inf]), (silu, WIDE), (gelu, WIDE), (gelu_tanh, WIDE)):
        slopes = mx.grad(lambda x, function=function: function(x).sum())(mx.array(places))
        assert bool(mx.isfinite(slopes).all())
    assert np.isnan(np.array(exp_minus(mx.array([np.nan])))).all()
    for signed in (numbers, -numbers):
        made = np.array(silu(mx.array(signed.astype(np.float32))))
        assert (np.abs(made - signed / (1 + np.exp(-signed))) <= 1e-6 * np.maximum(1, numbers)).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "experts", "sliding window"])
def test_logits_are_those_of_mlx_lm(name: str) -> None:
    """With weights in columns; a part of them is not kept twice."""
    model = build_model(FAMILY[name])
    widths = [1, 1, 3, 1] if name != "sliding window" else [1, 1, 1]
    wanted = steps(model, widths)
    weights = read_weights(model, in_columns=True)
    for linear in (*weights.layers[0].qkv, weights.layers[0].out):
        assert linear.transposed is not None
        assert np.asarray(linear.transposed).flags.c_contiguous
        assert np.shares_memory(np.asarray(linear.transposed), np.asarray(linear.weight))
    own = model.model.layers[0].self_attn.o_proj.weight
    assert np.shares_memory(np.asarray(own), np.asarray(weights.layers[0].out.weight))
    for got, expected in zip(steps(DecoderModel(weights, CpuOps()), widths), wanted, strict=True):
        assert alike(got, expected)
