"""Our kernels for CUDA against plain arithmetic in float32. They run where MLX has a CUDA device, and nowhere else."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import silu
from mlx.nn.layers.containers import Sequential
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from tests.support import plain_arithmetic
from tests.support.models import LLAMA, build_model
from zmqengine.engine import kv
from zmqengine.engine.autotune import attention, plain, quantised
from zmqengine.engine.cuda import between_products, drawing, kv_kernels, plain_products
from zmqengine.engine.cuda.between_products import HeadNorms, Heads, Rotation
from zmqengine.engine.host.backend import on_cuda, on_hopper
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.kernels import Move
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import SAMPLED, Draw, PlainDraw
from zmqengine.engine.seeds import seed_key, uniform

pytestmark = pytest.mark.skipif(not on_cuda(), reason="no CUDA device")


def error(got: mx.array, wanted: mx.array) -> float:
    """Of the size of what was wanted; not a number if something is not one."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    share = mx.linalg.norm((got - wanted).flatten()) / mx.linalg.norm(wanted.flatten())
    return float(np.array(share))


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(32, 8, 128), (14, 2, 64), (16, 16, 96), (8, 1, 128), (8, 4, 256)]
)
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize("with_gaps", [False, True])
def test_rows_of_unlike_lengths_attend_to_their_own(heads, key_heads, dim, width, parts, with_gaps):
    """Every row sees its own columns and no other, in any number of parts, with holes and without."""
    rows, columns, capacity = 5, 300, 512
    mx.random.seed(1)
    queries = mx.random.normal((rows, width, heads, dim)).astype(mx.bfloat16).transpose(0, 2, 1, 3)
    keys = mx.random.normal((rows, key_heads, capacity, dim)).astype(mx.bfloat16)
    values = mx.random.normal((rows, key_heads, capacity, dim)).astype(mx.bfloat16)
    starts = [0, 3, 131, 250, 299 - width]
    place = mx.arange(columns)[None, None, None]
    mask = place >= mx.array(starts)[:, None, None, None]
    mask = mask & (place <= (columns - width + mx.arange(width))[None, None, :, None])
    hidden = None
    if with_gaps:
        marks = np.zeros((rows, columns), np.uint8)
        marks[0, 10:20] = marks[2, 140:141] = marks[3, 251:290] = 1
        hidden = mx.array(marks)
        mask = mask & (hidden == 0)[:, None, None]
    spans = kv.Spans(
        mx.array(starts, dtype=mx.int32), columns, mx.array([columns], dtype=mx.int32), hidden, lambda: mask
    )
    used = (one[:, :, :columns].astype(mx.float32) for one in (keys, values))
    wanted = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *used, scale=0.1, mask=mask)
    views = (keys[:, :, :columns], values[:, :, :columns])
    assert error(attention.ragged_attention(queries, *views, spans, 0.1, parts), wanted) < 0.01
    assert error(attention.ragged_attention(queries, keys, values, spans, 0.1, parts), wanted) < 0.01


def test_a_prompt_attends_alike_without_cudnn():
    """What is computed while cuDNN has no plan is what it computes."""
    queries = mx.random.normal((1, 32, 70, 128)).astype(mx.bfloat16)
    keys = mx.random.normal((1, 8, 100, 128)).astype(mx.bfloat16)
    wanted = mx.fast.scaled_dot_product_attention(
        *(one.astype(mx.float32) for one in (queries, keys, keys)), scale=0.1, mask="causal"
    )
    assert error(attention.attend(queries, keys, keys, None, 0.1, "causal"), wanted) < 0.01


def test_a_long_prompt_attends_alike_in_parts(monkeypatch):
    """However many tokens are taken at once."""
    monkeypatch.setattr(attention, "_PART_BYTES", 0)
    monkeypatch.setattr(attention, "_PART_TOKENS_MIN", 32)
    queries = mx.random.normal((2, 8, 70, 64)).astype(mx.bfloat16)
    keys = mx.random.normal((2, 4, 100, 64)).astype(mx.bfloat16)
    wanted = mx.fast.scaled_dot_product_attention(
        *(one.astype(mx.float32) for one in (queries, keys, keys)), scale=0.1, mask="causal"
    )
    assert error(attention._unfused(queries, keys, keys, 0.1, "causal"), wanted) < 0.01


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (4, 128), (8, 32)])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 33, 64])
def test_quantised_weights_are_multiplied_for_few_rows(dtype, bits, group, rows):
    """The product is that of the weights in full width, also where the outputs fill no whole block."""
    mx.random.seed(2)
    layer = QuantizedLinear.from_linear(Linear(1024, 1000 + 8 * (bits == 8), bias=False), group, bits)
    layer.set_dtype(dtype)
    inputs = mx.random.normal((rows, 1, 1024)).astype(dtype)
    wide = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=group, bits=bits)
    wanted = inputs.astype(mx.float32) @ wide.astype(mx.float32).T
    assert error(quantised.few_rows(inputs, layer), wanted) < 0.01


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
    inputs = mx.random.normal((40, 1, 1024 + 64)).astype(dtype)
    wanted = inputs.astype(mx.float32) @ layer.weight.astype(mx.float32).T
    if bias:
        wanted = wanted + layer.bias.astype(mx.float32)
    whole = plain.few_rows(inputs, layer)
    assert error(whole, wanted) < 0.01
    for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33):
        assert mx.array_equal(plain.few_rows(inputs[:rows], layer), whole[:rows]), rows
    assert mx.array_equal(plain.few_rows(inputs[:30].reshape(6, 5, -1), layer).reshape(30, 1, -1), whole[:30])
    if not bias and outputs % 2 == 0:
        for rows in (5, 30, 40):
            got = plain_products.few_rows(inputs[:rows, 0], layer.weight, gated=True)
            assert error(got, halves(whole[:rows, 0])) < 0.005


@pytest.mark.skipif(not on_hopper(), reason="no Hopper")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 1000), (1088, 1000), (1088, 6008), (4096, 1024), (1088, 20_000)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_plain_weights_are_multiplied_for_many_rows(dtype, inputs, outputs, bias):
    """Also where outputs fill no whole block and inputs are cut; and a row gets the same, whoever is beside it."""
    mx.random.seed(2)
    layer = Linear(inputs, outputs, bias=bias)
    layer.set_dtype(dtype)
    rows = mx.random.normal((256, 1, inputs)).astype(dtype)
    wanted = rows.astype(mx.float32) @ layer.weight.astype(mx.float32).T
    if bias:
        wanted = wanted + layer.bias.astype(mx.float32)
    whole = plain.many_rows(rows, layer)
    assert error(whole, wanted) < 0.01
    for some in (1, 7, 8, 41, 79, 80, 81, 120, 155, 160, 161, 250):
        assert mx.array_equal(plain.many_rows(rows[:some], layer), whole[:some]), some
    assert mx.array_equal(
        plain.many_rows(rows[:150].reshape(30, 5, -1), layer).reshape(150, 1, -1), whole[:150]
    )
    parts = plain_products.parts_of_many_rows(rows[:150, 0], layer.weight)
    if parts.ndim == 3:
        assert parts.dtype == mx.float32
        parts = parts.sum(axis=0)
    assert error(parts + layer.bias if bias else parts, wanted[:150, 0]) < 0.01
    if not bias:
        for some in (70, 150, 256):
            got = plain_products.many_rows_gated(rows[:some, 0], layer.weight)
            assert got is None or error(got, halves(whole[:some, 0])) < 0.005
        assert got is not None or outputs < 6008


def in_parts(product: mx.array, parts: int) -> mx.array:
    """Arrays [parts, ...] in float32 that add up to about `product`, or itself if there are none."""
    if not parts:
        return product
    shares = mx.random.normal((parts - 1, *product.shape)) * 0.3
    return mx.concatenate([shares, (product.astype(mx.float32) - shares.sum(axis=0))[None]])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("rows", "width", "dim"), [(1, 1, 64), (3, 5, 896), (32, 5, 4096), (2, 1, 5124)])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_what_a_product_adds_is_normed_with_it(dtype, rows, width, dim, parts):
    """The sum to the last bit, where the product is whole; what is normed as MLX does it."""
    mx.random.seed(4)
    residual = mx.random.normal((rows, width, dim)).astype(dtype)
    added = in_parts(mx.random.normal((rows * width, dim)).astype(dtype), parts)
    weight = mx.random.uniform(0.5, 2.0, (dim,)).astype(dtype)
    total, normed = between_products.add_and_norm(residual, added, weight, 1e-5)
    wanted_total, wanted_normed = plain_arithmetic.add_and_norm(residual, added, weight, 1e-5)
    assert error(total, wanted_total) < (0.002 if parts else 1e-9)
    assert error(normed, wanted_normed) < 0.005


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "dims"),
    [(32, 8, 128, 128), (14, 2, 64, 64), (4, 4, 256, 64), (5, 1, 128, 64)],
)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (32, 1)])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("with_freqs", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_are_turned_by_their_places(
    dtype, heads, key_heads, dim, dims, rows, width, parts, with_freqs, with_norms
):
    """As MLX turns them, at the beginning and far on; keys and values stand as caches have them."""
    mx.random.seed(5)
    outputs = (heads + 2 * key_heads) * dim
    product = in_parts(mx.random.normal((rows * width, outputs)).astype(dtype), parts)
    freqs = mx.power(2.0, mx.arange(dims // 2) / 5.0) if with_freqs else None
    rotation = Rotation(dims, False, None if with_freqs else 500_000.0, 0.5, freqs)
    weights = mx.random.uniform(0.5, 2.0, (2, dim)).astype(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if with_norms else None
    offset = mx.array([(row * 3001) % 20_000 for row in range(rows)], dtype=mx.int32)
    layer = Heads(heads, key_heads, dim, dtype, rotation, norms)
    wanted = plain_arithmetic.turned(layer, product, offset, width)
    exact = 0.005 if dtype == mx.bfloat16 or parts else 1e-4
    for got, other in zip(layer.turned(product, offset, width), wanted, strict=True):
        assert got.shape == other.shape
        assert error(got, other) < exact
    keys, values = (mx.random.normal((rows, key_heads, 40, dim)).astype(dtype)[:, :, 3:] for _ in range(2))
    before = [np.array(one.astype(mx.float32)) for one in (keys, values)]
    queries = layer.turned_into(product, offset, width, keys, values, mx.array([20]))
    assert error(queries, wanted[0]) < exact
    for array, old, new in zip((keys, values), before, wanted[1:], strict=True):
        assert error(array[:, :, 20 - width : 20], new) < exact
        untouched = np.array(array.astype(mx.float32))
        untouched[:, :, 20 - width : 20] = old[:, :, 20 - width : 20]
        assert np.array_equal(untouched, old)


@pytest.mark.parametrize(("dim", "dtype"), [(128, mx.bfloat16), (64, mx.float16), (256, mx.float32)])
def test_rows_are_copied_into_others_and_nothing_else_changes(dim, dtype):
    """Within the same arrays and out of others, of which a row may be any part."""

    def pair(*shape: int) -> tuple[mx.array, mx.array]:
        return mx.random.normal(shape).astype(dtype), mx.random.normal(shape).astype(dtype)

    layers = [pair(5, 3, 256, dim) for _ in range(2)]
    others = [(keys[..., 10:, :], values[..., 10:, :]) for keys, values in [pair(2, 3, 200, dim)] * 2]
    for sources, moves in (
        (layers, [Move(4, 1, 0, 0, 200), Move(3, 0, 70, 70, 65)]),
        (others, [Move(0, 3, 0, 60, 190), Move(1, 4, 3, 0, 1)]),
    ):
        wanted = [(keys + 0, values + 0) for keys, values in layers]
        mx.eval(layers, others, wanted)
        mx.eval(kv_kernels.move_rows(layers, sources, moves))
        for layer, other, source in zip(
            layers, wanted, wanted if sources is layers else sources, strict=True
        ):
            for got, array, given in zip(layer, other, source, strict=True):
                for move in moves:
                    columns = given[move.from_row, :, move.from_start : move.from_start + move.columns]
                    array[move.row, :, move.start : move.start + move.columns] = columns
                assert np.array_equal(np.array(got.astype(mx.float32)), np.array(array.astype(mx.float32)))


@pytest.mark.skipif(not on_hopper(), reason="no Hopper")
def test_outputs_that_are_no_fours_and_other_types_are_left_to_mlx():
    """A vocabulary may have any size; what is in float32 is not multiplied with weights in half precision."""
    alone = Sequential(Linear(128, 1001, bias=False))
    alone.set_dtype(mx.bfloat16)
    plain.turn_weights(alone)
    plain_model = build_model({**LLAMA, "hidden_size": 256, "vocab_size": 257})
    plain_model.set_dtype(mx.bfloat16)
    chosen = plain.measure(plain_model, until_s=math.inf, known={})
    assert {way for name, way in chosen.items() if "x257," in name} in ({"product"}, {"product", "kernel"})
    rows = mx.random.normal((50, 128))
    wanted = rows @ alone.layers[0].weight.astype(mx.float32).T
    assert error(plain.many_rows(rows, alone.layers[0]), wanted) < 0.01


def test_a_model_takes_the_kernel_and_gives_it_back():
    """Layers go by what was measured, the head of a tied model too; what was remembered is not measured again."""
    model = build_model({**LLAMA, "hidden_size": 256, "intermediate_size": 512})
    model.set_dtype(mx.bfloat16)
    tokens = mx.array([[1], [2], [3]])
    before = model(tokens)
    found = plain.measure(model, until_s=math.inf, known={})
    assert set(found.values()) <= set(plain.WAYS)
    few = tuple(f", {rows} rows" for rows in plain.ROWS if rows <= plain_products.FEW_ROWS_MAX)
    known = {name: "kernel" if name.endswith(few) else "product" for name in found}
    assert plain.measure(model, until_s=0.0, known=known) == known
    assert error(model(tokens), before) < 0.02
    plain.restore(model)
    assert mx.array_equal(model(tokens), before)


def chosen(logits, rows, drawn=0, width=1):
    """What the kernel chooses, as the device and the host see it."""
    tokens, told = drawing.choose(logits, drawing.columns(rows), drawn, width)
    read, marks = drawing.read(told, logits.shape[0])
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
        drawing.Drawn(
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
    plan = [drawing.Drawn(seed_key(seed), seed % 5, 1.0, words, 1.0, -math.inf) for seed in seeds]
    got, _ = chosen(mx.zeros((rows * width, words), mx.bfloat16), plan, drawn, width)
    wanted = [
        int(uniform(row.key, row.place + drawn + ahead) * words) for row in plan for ahead in range(width)
    ]
    assert got == wanted


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 256])
def test_the_likeliest_token_is_the_first_of_those(rows):
    """Beside rows that sample or alone; what is not a number is told."""
    rng = np.random.default_rng(rows)
    logits = rng.integers(-50, 50, (rows, 1001)).astype(np.float32)
    plan = [
        drawing.Drawn(1, 0, 0.0 if row % 3 else 1.0, 1001 if row % 3 else 1, 1.0, -math.inf)
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
        "kernel": drawing.KernelDraw(),
    }
    drawn = {name: np.array(way.plan(rows, 128_256).draw(logits)[0]) for name, way in ways.items()}
    assert (drawn["search"] == drawn["sort"]).sum() >= 30
    assert (drawn["search"] == drawn["kernel"]).sum() >= 30
