"""Our kernels for CUDA against plain arithmetic in float32. They run where MLX has a CUDA device, and nowhere else."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import silu
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear, quantize

from tests.support.models import LLAMA, build_model
from zmqengine.engine.cuda import (
    between_products,
    cuda_ops,
    draw_kernel,
    plain_products,
)
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load import open_model
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.families.reading import linear_of
from zmqengine.engine.models.layers import HeadShape, QueryKeyNorms, RotaryEmbedding
from zmqengine.engine.models.layers import Linear as LinearWeights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.tree import parts_of
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import SAMPLED, Draw, PlainDraw
from zmqengine.engine.seeds import seed_key, uniform

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.skipif(not on_cuda(), reason="no CUDA device")]


def error(got: mx.array, wanted: mx.array) -> float:
    """The relative error; NaN if a number is NaN."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    share = mx.linalg.norm((got - wanted).flatten()) / mx.linalg.norm(wanted.flatten())
    return float(np.array(share))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (4, 128), (8, 32)])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 33, 64])
def test_quantised_weights_are_multiplied_for_few_rows(dtype, bits, group, rows):
    """The product is that of the weights in full width, also where the outputs fill no whole block."""
    mx.random.seed(2)
    layer = QuantizedLinear.from_linear(Linear(1024, 1000 + 8 * (bits == 8), bias=False), group, bits)
    layer.set_dtype(dtype)
    inputs = mx.random.normal((rows, 1024)).astype(dtype)
    wide = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=group, bits=bits)
    wanted = inputs.astype(mx.float32) @ wide.astype(mx.float32).T
    assert error(cuda_ops.few_quantised_rows(inputs, linear_of(layer)), wanted) < 0.01


def halves(outputs: mx.array) -> mx.array:
    """Of a gated layer."""
    gate, up = mx.split(outputs, 2, axis=-1)
    return silu(gate) * up


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("outputs", [1000, 6001, 9000])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_weights_are_multiplied_for_few_rows(dtype, outputs, bias):
    """Also where outputs fill no whole block; and a row gets the same to the last bit, whoever is beside it."""
    mx.random.seed(2)
    layer = Linear(1024 + 64, outputs, bias=bias)
    layer.set_dtype(dtype)
    linear = linear_of(layer)
    inputs = mx.random.normal((32, 1024 + 64)).astype(dtype)
    wanted = inputs.astype(mx.float32) @ layer.weight.astype(mx.float32).T
    if bias:
        wanted = wanted + layer.bias.astype(mx.float32)
    whole = cuda_ops.few_rows(inputs, linear)
    assert error(whole, wanted) < 0.01
    for rows in (1, 2, 5, 8, 9, 16, 17, 32):
        assert mx.array_equal(cuda_ops.few_rows(inputs[:rows], linear), whole[:rows]), rows
    if outputs % 2 == 0:
        for rows in (5, 30, 32):
            got = plain_products.few_rows(inputs[:rows], layer.weight, linear.bias, activation="silu")
            assert error(got, halves(whole[:rows])) < 0.005


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "dims"),
    [(32, 8, 128, 128), (14, 2, 64, 64), (4, 4, 256, 64), (5, 1, 128, 64)],
)
@pytest.mark.parametrize("tokens", [1, 15, 32])
@pytest.mark.parametrize("with_freqs", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_are_rotated_into_slots(dtype, heads, key_heads, dim, dims, tokens, with_freqs, with_norms):
    """As MLX rotates them, at the beginning and far on; nothing else in the slots changes."""
    mx.random.seed(5)
    outputs = (heads + 2 * key_heads) * dim
    product = mx.random.normal((tokens, outputs)).astype(dtype)
    freqs = mx.power(2.0, mx.arange(dims // 2) / 5.0) if with_freqs else None
    rotation = RotaryEmbedding(dims, False, None if with_freqs else 500_000.0, 0.5, freqs, 1.0)
    norms = None
    if with_norms:
        weights = mx.random.uniform(0.5, 2.0, (2, dim)).astype(dtype)
        both = mx.concatenate([mx.tile(weights[:1], (heads, 1)), mx.tile(weights[1:], (key_heads, 1))])
        norms = QueryKeyNorms(weights[0], weights[1], both, 1e-6)
    positions = mx.array([(token * 3001) % 20_000 for token in range(tokens)], dtype=mx.int32)
    shape = HeadShape(heads, key_heads, dim, 1.0, rotation, norms, None, dtype)
    wanted = PlainOps().rotate(product, shape, positions)
    # Two pools; each token is in a column of its own of the second slot.
    pools = [mx.random.normal((2, key_heads, 40, dim)).astype(dtype) for _ in range(4)]
    before = [np.array(array.astype(mx.float32)) for array in pools]
    far: Any = positions.tolist()
    places = [(token % 2, 1, token + 3, position) for token, position in enumerate(far)]
    queries = between_products.rotate(shape, product, mx.array(places, mx.int32).flatten(), pools)
    exact = 0.005 if dtype == mx.bfloat16 else 1e-4
    assert error(queries, wanted[0]) < exact
    for number, (array, old) in enumerate(zip(pools, before, strict=True)):
        pool, kind = number // 2, number % 2
        columns = [column for which, _, column, _ in places if which == pool]
        new = wanted[1 + kind][pool::2].swapaxes(0, 1)
        if columns:
            assert error(array[1][:, mx.array(columns)], new) < exact
        untouched = np.array(array.astype(mx.float32))
        untouched[1][:, columns] = old[1][:, columns]
        assert np.array_equal(untouched, old)


def test_inputs_of_another_type_are_left_to_mlx():
    """Inputs in float32 are not multiplied with weights in half precision by a kernel, nor are many rows."""
    layer = Linear(128, 1001, bias=False)
    layer.set_dtype(mx.bfloat16)
    linear = linear_of(layer)
    ops = CudaOps()
    assert set(ops.variants(linear, 8)) == {"product", "kernel"}
    assert set(ops.variants(linear, 80)) == {"product"}
    rows = mx.random.normal((20, 128))
    wanted = rows @ layer.weight.astype(mx.float32).T
    assert error(cuda_ops.few_rows(rows, linear), wanted) < 0.01


@pytest.mark.parametrize("bits", [0, 4])
def test_a_model_on_every_kernel_says_what_it_says_without(bits):
    """Products by the kernels for few rows, the head of a tied model too; prompts, steps and verify blocks."""
    model = build_model({**LLAMA, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512})
    model.set_dtype(mx.bfloat16)
    if bits:
        quantize(model, group_size=64, bits=bits)
    weights = read_weights(model)
    ops = CudaOps()
    for linear in parts_of(weights, LinearWeights):
        rows = [1, *ops.measured_rows(linear)]
        ops.choose(linear, {count: list(ops.variants(linear, count))[-1] for count in rows})
    tuned, plain = DecoderModel(weights, ops), DecoderModel(weights, PlainOps(cuda_ops.QUANTISED_ROWS_MAX))
    for got, wanted in zip(open_model._many_logits(tuned), open_model._many_logits(plain), strict=True):
        assert error(mx.array(got), mx.array(wanted)) < 0.05


def chosen(logits, rows, drawn=0, width=1):
    """What the kernel chooses, as the device and the host see it."""
    tokens, told = draw_kernel.choose(logits, draw_kernel.columns(rows), drawn, width)
    read, marks = draw_kernel.read(told, logits.shape[0])
    assert tokens.tolist() == read
    return read, marks


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("words", [5000, 5003])
def test_a_draw_is_that_of_plain_arithmetic(dtype, words):
    """Each row keeps what its own top_k, top_p and min_p leave, and takes the token that the number falls on."""
    rng = np.random.default_rng(3)
    rows = 64
    logits = mx.array(rng.normal(0, 2, (rows, words)).astype(np.float32)).astype(dtype)
    temperature = rng.uniform(0.3, 1.5, rows)
    top_k = rng.choice([5, 40, words], rows)
    top_p = rng.choice([0.5, 0.9, 1.0], rows)
    min_p = rng.choice([0.0, 0.05], rows)
    keys = [seed_key(seed) for seed in range(rows)]
    plan = [
        draw_kernel.Drawn(
            keys[row],
            row,
            1 / temperature[row],
            int(top_k[row]),
            top_p[row],
            float(np.log(max(min_p[row], 1e-30))),
        )
        for row in range(rows)
    ]
    got, marks = chosen(logits, plan, drawn=3)
    assert marks == [0.0] * rows
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    right = 0
    for row, token in enumerate(got):
        weights = np.exp((exact[row] - exact[row].max()) / temperature[row])
        order = np.argsort(-weights, kind="stable")
        weights[weights < weights[order[top_k[row] - 1]]] = 0
        ranked = weights[order]
        enough = (
            int(np.argmax(np.cumsum(ranked) >= top_p[row] * ranked.sum() - 1e-9))
            if top_p[row] < 1
            else words - 1
        )
        weights[weights < weights[order[enough]]] = 0
        weights[weights < min_p[row] * weights.max()] = 0
        up_to = np.cumsum(weights)
        right += int(token == int(np.argmax(up_to > uniform(keys[row], row + 3) * up_to[-1])))
    # A number next to the border between two tokens may fall on either.
    assert right >= rows - 2


@pytest.mark.parametrize(("drawn", "width"), [(0, 1), (7, 1), (1000, 4)])
def test_the_numbers_that_are_drawn_with_are_those_of_every_device(drawn, width):
    """Of equally likely tokens, as many as there can be numbers to tell apart, each number takes the one it names."""
    words, rows = 1 << 16, 33
    seeds = [0, 1, 2**63, 2**64 - 1, *range(100, 100 + rows - 4)]
    plan = [draw_kernel.Drawn(seed_key(seed), seed % 5, 1.0, words, 1.0, -math.inf) for seed in seeds]
    got, _ = chosen(mx.zeros((rows * width, words), mx.bfloat16), plan, drawn, width)
    wanted = [
        int(uniform(row.key, row.output_index + drawn + ahead) * words)
        for row in plan
        for ahead in range(width)
    ]
    assert got == wanted


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 256])
def test_the_likeliest_token_is_the_first_of_those(rows):
    """Beside rows that sample or alone; what is not a number is told."""
    rng = np.random.default_rng(rows)
    logits = rng.integers(-50, 50, (rows, 1001)).astype(np.float32)
    plan = [
        draw_kernel.Drawn(1, 0, 0.0 if row % 3 else 1.0, 1001 if row % 3 else 1, 1.0, -math.inf)
        for row in range(rows)
    ]
    got, marks = chosen(mx.array(logits).astype(mx.bfloat16), plan)
    likeliest = logits.argmax(axis=-1)
    for row in range(rows):
        assert logits[row, got[row]] == logits[row, likeliest[row]]
        assert not row % 3 or got[row] == likeliest[row]
    assert marks == [0.0] * rows
    logits[0] = np.nan
    logits[-1, 7] = np.inf
    _, marks = chosen(mx.array(logits).astype(mx.bfloat16), plan)
    assert math.isnan(marks[0])
    assert math.isnan(marks[-1])
    assert marks[1:-1] == [0.0] * max(0, rows - 2)


def test_all_methods_draw_alike():
    """The kernel and MLX's own calls, on a vocabulary of the usual size."""
    logits = (mx.random.normal((32, 128_256)) * 2).astype(mx.bfloat16)
    rows = [
        Row(RowRequest(row=row, prompt=[0], max_tokens=9, sampling=SAMPLED[0], seed=row), 128_256, 99)
        for row in range(32)
    ]
    ways: dict[str, Draw] = {
        "search": PlainDraw("search"),
        "sort": PlainDraw("sort"),
        "kernel": draw_kernel.KernelDraw(),
    }
    drawn = {name: np.array(way.plan(rows, 128_256).draw(logits)[0]) for name, way in ways.items()}
    assert (drawn["search"] == drawn["sort"]).sum() >= 30
    assert (drawn["search"] == drawn["kernel"]).sum() >= 30
