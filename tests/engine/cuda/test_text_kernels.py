"""Texts one after the other attend and are pooled as each of them is by MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import gelu

from tests.support import cuda_on_cpu
from zmqengine.engine.autotune.variants import same_but_for_rounding
from zmqengine.engine.cuda import text_kernels
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.models.text_ops import LayerStack, NormOfSums, Tables

LENGTHS = [1, 5, 40, 70, 3, 1, 1]


pytestmark = pytest.mark.usefixtures("kernels_as_written")


def spans(lengths: list[int]) -> tuple[mx.array, mx.array]:
    """The tables of tokens and of texts, the latter with a text that has no tokens."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    tokens = np.concatenate([np.repeat(begins, lengths), np.repeat(ends, lengths)])
    texts = np.concatenate([begins, [0], ends, [0]])
    return mx.array(tokens.astype(np.int32)), mx.array(texts.astype(np.int32))


@pytest.mark.parametrize(("dim", "heads", "key_heads"), [(32, 3, 3), (64, 4, 2), (8, 2, 1)])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("sloped", [False, True])
def test_a_token_attends_to_its_text(
    dim: int, heads: int, key_heads: int, window: int | None, sloped: bool
) -> None:
    """In any place of a thread block, whatever its neighbours are; one that is no number stays in its text."""
    counts = heads, key_heads, key_heads
    product = mx.random.normal((sum(LENGTHS), sum(counts), 1, dim), key=mx.random.key(dim))
    begin = sum(LENGTHS[:3])
    product[begin + 7] = float("nan")
    queries, keys, values = mx.split(product, [heads, heads + key_heads], axis=1)
    slopes = mx.array([0.5 / (1 + head) for head in range(heads)]) if sloped else None
    got = np.array(
        text_kernels.attend(queries, keys, values, spans(LENGTHS)[0], scale=0.3, window=window, slopes=slopes)
    )
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        start += length
        distances = mx.abs(mx.arange(length)[:, None] - mx.arange(length))
        terms = mx.zeros((1, 1, length, length)) if slopes is None else -slopes[:, None, None] * distances
        mask = mx.where(distances <= (length if window is None else window), terms, -mx.inf)
        each = (array[rows].transpose(2, 1, 0, 3) for array in (queries, keys, values))
        wanted = mx.fast.scaled_dot_product_attention(*each, scale=0.3, mask=mask)
        expected = np.array(wanted.transpose(0, 2, 1, 3).reshape(length, -1))
        if rows.start == begin:
            far = window is not None
            assert np.isnan(got[begin + 7]).all()
            assert np.isfinite(got[begin + 30 : rows.stop]).all() == far
        else:
            np.testing.assert_allclose(got[rows], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("width", [96, 300])
@pytest.mark.parametrize("has", [(True, True, True), (False, True, True), (False, False, False)])
def test_what_tokens_are_embedded_as_is_summed_and_normed(
    of_pairs: bool, width: int, has: tuple[bool, bool, bool]
) -> None:
    """With and without positions, types and a bias; spans and positions are copied unchanged."""
    words, positions, types, both = (
        mx.random.normal((count, width), key=mx.random.key(count)) for count in (50, 20, 2, 3)
    )
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 17, (4 + of_pairs, 33)).astype(np.int32)
    if of_pairs:
        tokens[2] %= 2
    texts = draw.integers(0, 33, (2, 300)).astype(np.int32)
    of_positions, of_types, biased = has
    weight, bias = both[0], both[1] if biased else None
    tables = Tables(
        words, positions if of_positions else None, 3, types if of_types else None, weight, bias, 1e-5
    )
    found = text_kernels.embed(mx.array(tokens), mx.array(texts), tables)
    states, spans, places, text_spans, arrivals = found
    wanted = words[mx.array(tokens[0])]
    if of_positions:
        wanted = wanted + positions[mx.array(tokens[1] + 3)]
    if of_types:
        wanted = wanted + types[mx.array(tokens[2] if of_pairs else tokens[0] * 0)]
    normed = mx.fast.layer_norm(wanted, weight, bias, 1e-5)
    np.testing.assert_allclose(np.array(states), np.array(normed), rtol=1e-4, atol=1e-5)
    assert np.array(spans).tolist() == tokens[-2:].ravel().tolist()
    assert np.array(places).tolist() == tokens[1].tolist()
    assert np.array(text_spans).tolist() == texts.ravel().tolist()
    assert np.array(arrivals).tolist() == [0]


@pytest.mark.parametrize("largest", [False, True])
def test_a_text_is_pooled_alone(largest: bool) -> None:
    """A text without tokens is zeros; a NaN stays in its own text."""
    states = np.random.default_rng(1).normal(size=(sum(LENGTHS), 200)).astype(np.float32)
    states[3, 5] = np.nan
    got = np.array(text_kernels.pool(mx.array(states), spans(LENGTHS)[1], largest=largest))
    pieces = np.split(states, np.cumsum(LENGTHS)[:-1])
    expected = [piece.max(axis=0) if largest else piece.mean(axis=0) for piece in pieces]
    np.testing.assert_allclose(got, [*expected, np.zeros(200)], atol=1e-6)


@pytest.mark.parametrize("texts", [1, 3])
def test_vectors_are_delivered_into_memory(texts: int) -> None:
    """Once the array that is returned is computed, they are in memory of the host; numbers behind them are left."""
    vectors = mx.random.normal((texts, 100), key=mx.random.key(texts))
    memory = mx.array(np.full(400, 7, np.float32))
    floats = np.asarray(memory)
    mx.eval(text_kernels.deliver(vectors, memory))
    assert floats.tolist() == [*np.array(vectors).ravel().tolist(), *[7] * (400 - 100 * texts)]


def rounded(array: mx.array) -> np.ndarray:
    """Numbers with the 10 bits of mantissa of TF32, the nearest; their products are exact in float32."""
    words = np.array(array, np.float32).view(np.uint32)
    return ((words + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)


def within_tf32(got: mx.array, rows: mx.array, weights: mx.array, added: mx.array | float = 0.0) -> None:
    """A product whose factors are rounded by 1 part in 2,048 each, which may be 1 in 1,024 of every term of a sum."""
    exact, weight = np.array(rows, np.float64), np.array(weights, np.float64)
    bound = np.abs(exact) @ np.abs(weight).T / 1024 + 1e-4
    assert (np.abs(np.array(got) - (exact @ weight.T + np.array(added))) <= bound).all()


@pytest.fixture(params=text_kernels._TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> text_kernels.Tile:
    """Each of the tiles, for products of any size."""
    monkeypatch.setattr(text_kernels, "_TILES", (request.param,))
    found: text_kernels.Tile = request.param
    return found


def test_a_product_has_its_bias_activation_and_sum(tile: text_kernels.Tile) -> None:
    """In full and in partial blocks, of more parts than are in shared memory; each of the three, and two together."""
    inputs, outputs = 900, 13
    count = tile.rows + 5
    rows, weights, bias, added = (
        mx.random.normal(shape, key=mx.random.key(seed))
        for seed, shape in enumerate([(count, inputs), (outputs, inputs), (outputs,), (count, outputs)])
    )
    weights = weights / 20
    plain = mx.array((rounded(rows) @ rounded(weights).T).astype(np.float32))
    for got, wanted in (
        (text_kernels.multiply(rows, weights.T, None), plain),
        (text_kernels.multiply(rows, weights.T, bias), plain + bias),
        (text_kernels.multiply(rows, weights.T, bias, gelu=True), gelu(plain + bias)),
        (text_kernels.multiply(rows, weights.T, None, added=added), plain + added),
    ):
        np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-4, atol=1e-5)
    within_tf32(text_kernels.multiply(rows, weights.T, None), rows, weights)


def test_a_product_norms_the_sums_of_another(tile: text_kernels.Tile) -> None:
    """The norm applies to the rows, or to the added array; sums far from 0 keep their precision, and factors may have
    fewer parts than are in shared memory."""
    count, width, outputs = tile.rows + 5, 264, 16
    shapes = [(count, 64), (width, 64), (count, width), (outputs, width), (width,), (width,)]
    rows, weights, added, more, factor, term = (
        mx.random.normal(shape, key=mx.random.key(seed)) for seed, shape in enumerate(shapes)
    )
    added = added + 100
    made = mx.array((rounded(rows) @ rounded(weights).T).astype(np.float32))
    sums, stats = text_kernels.sum_up(rows, weights.T, None, added, None)
    norm = NormOfSums(stats, factor, term, 1e-12)
    np.testing.assert_allclose(np.array(sums), np.array(added + made), rtol=1e-5)
    normed = mx.fast.layer_norm(added + made, factor, term, 1e-12)
    within_tf32(text_kernels.multiply(sums, more.T, None, norm=norm), normed, more)
    again, _ = text_kernels.sum_up(rows, weights.T, factor, sums, norm)
    np.testing.assert_allclose(np.array(again), np.array(normed + made + factor), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("count", "outputs", "tile"),
    [
        (32, 1152, (32, 16)),
        (32, 384, (16, 8)),
        (224, 1152, (64, 64)),
        (224, 384, (32, 32)),
        (1792, 1152, (128, 64)),
    ],
)
def test_the_tile_of_a_product_is_the_smallest_of_which_all_run_at_once(
    count: int, outputs: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products of a BERT of width 384, of 1, 8 and 64 texts, on an H200; the largest where none does."""
    monkeypatch.setattr(text_kernels, "multiprocessors", lambda: 132)
    assert text_kernels.Tile.of(count, outputs)[:2] == tile


HEADS, WIDTH, INNER, EPS = 4, 32, 72, 1e-5


def layer_stack(layers: int) -> LayerStack:
    """Random layers."""
    shapes = {
        "qkv_weight": (3 * WIDTH, WIDTH), "qkv_bias": (3 * WIDTH,), "out_weight": (WIDTH, WIDTH),
        "middle_weight": (WIDTH,), "middle_bias": (WIDTH,), "up_weight": (INNER, WIDTH), "up_bias": (INNER,),
        "down_weight": (WIDTH, INNER), "norm_weight": (WIDTH,), "norm_bias": (WIDTH,),
    }  # fmt: skip
    arrays = {
        name: mx.random.normal((layers, *shape), key=mx.random.key(seed)) / 4
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return LayerStack(HEADS, EPS, **arrays)


@pytest.mark.skipif(on_cuda(), reason="all blocks run at once")
def test_layers_whose_blocks_do_not_run_at_once_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and rows are no numbers, whatever a later block writes. On a CPU blocks run one by one."""
    monkeypatch.setattr(text_kernels, "multiprocessors", lambda: 2)
    # A device leaves memory as it is, which may be finite.
    monkeypatch.setattr(cuda_on_cpu, "_unwritten", lambda shape, _: np.zeros(shape, np.float32))
    tables, _ = spans([7, 1, 30])
    states = mx.random.normal((38, WIDTH), key=mx.random.key(99))
    stack = layer_stack(1)
    got, again = (text_kernels.layers(states, tables, mx.zeros((1,), mx.int32), stack) for _ in range(2))
    assert np.isnan(np.array(got)).sum() > got.size / 2
    assert not same_but_for_rounding(got, again)


@pytest.mark.parametrize("layers", [1, 2])
def test_all_layers_in_one_kernel_are_those_by_a_kernel_for_each_operation(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one block, or on a device by as many as it has multiprocessors."""
    if not on_cuda():
        monkeypatch.setattr(text_kernels, "multiprocessors", lambda: 1)
    stack = layer_stack(layers)
    assert text_kernels.stacks(stack)
    tables, _ = spans([7, 1, 30])
    states = mx.random.normal((38, WIDTH), key=mx.random.key(99))
    got = text_kernels.layers(states, tables, mx.zeros((1,), mx.int32), stack)

    sums, norm = states, None
    for layer in range(layers):
        each = LayerStack(HEADS, EPS, *(array[layer] for array in stack[2:]))
        product = text_kernels.multiply(sums, each.qkv_weight.T, each.qkv_bias, norm=norm)
        queries, keys, values = mx.split(product.reshape(38, 3 * HEADS, 1, -1), 3, axis=1)
        attended = text_kernels.attend(
            queries, keys, values, tables, scale=(WIDTH // HEADS) ** -0.5, window=None, slopes=None
        )
        between, stats = text_kernels.sum_up(attended, each.out_weight.T, None, sums, norm)
        norm = NormOfSums(stats, each.middle_weight, each.middle_bias, EPS)
        wide = text_kernels.multiply(between, each.up_weight.T, each.up_bias, gelu=True, norm=norm)
        sums, stats = text_kernels.sum_up(wide, each.down_weight.T, None, between, norm)
        norm = NormOfSums(stats, each.norm_weight, each.norm_bias, EPS)
    np.testing.assert_allclose(np.array(got), np.array(sums), rtol=1e-4, atol=1e-5)
