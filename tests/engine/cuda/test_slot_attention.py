"""Rows over slots attend, and their slots are written, as by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels
from tests.support.calls import calls_of
from tests.support.models import LLAMA, build_model
from zmqengine.engine.cuda import attention, kernel, slot_attention
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.cuda.slot_attention import CudaAttention
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv.slots import POOLS_MAX, KVShape, MlxStorage, Slots
from zmqengine.engine.models.attention import MlxAttention, PlacedPiece
from zmqengine.engine.models.decoder import DecoderModel, Inputs
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.layers import HeadShape, QueryKeyNorms, RotaryEmbedding
from zmqengine.engine.models.ops import PlainOps

pytestmark = pytest.mark.cuda_emulated

CONTEXT = 4096


@dataclass(frozen=True)
class Tokens:
    """The next `count` tokens of a row that has `computed`, in a slot of `capacity`; positions are ahead by `shift`."""

    computed: int
    count: int
    capacity: int = 512
    shift: int = 0


STEPS = {
    "rows in decode of unlike lengths": [
        Tokens(0, 1),
        Tokens(1, 1),
        Tokens(39, 1),
        Tokens(15, 1),
        Tokens(16, 1),
    ],
    "verify blocks of unlike widths": [Tokens(5, 3), Tokens(60, 8), Tokens(31, 1), Tokens(0, 6)],
    "a prompt beside rows in decode": [Tokens(40, 1), Tokens(7, 1), Tokens(0, 30)],
    # Three heads share keys: the last of three tiles of 64 queries has 7 of them.
    "a prompt of several tiles": [Tokens(30, 45), Tokens(0, 9)],
    "several pools": [
        Tokens(20, 1),
        Tokens(3, 4),
        Tokens(9, 1, 1024),
        Tokens(0, 25, 1024),
        Tokens(2, 1, 2048),
    ],
    # Enough columns that thread blocks share them.
    "rows of many columns": [Tokens(300, 1), Tokens(7, 3), Tokens(255, 40), Tokens(511, 1, 1024)],
    "verify blocks of many columns": [Tokens(300, 1), Tokens(7, 3), Tokens(255, 6), Tokens(511, 1, 1024)],
    "positions ahead of columns": [Tokens(20, 1, shift=7), Tokens(20, 1)],
}
# What shapes differ in meets tiles and parts in these; 40 tokens of many columns take a CPU as long as all the others.
FEW = "verify blocks of unlike widths", "a prompt of several tiles", "verify blocks of many columns"


def numbers(shape: Sequence[int], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def head_shape(dim: int, dtype: mx.Dtype = mx.float16, *, normed: bool = False, **changes: Any) -> HeadShape:
    shape = HeadShape(
        6, 2, dim, dim**-0.5, RotaryEmbedding(dim, False, 1e4, 1.0, None, 1.0), None, None, dtype
    )
    shape = shape._replace(**changes)
    if not normed:
        return shape
    queries, keys = (numbers((dim,), seed, dtype) for seed in (1, 2))
    counts = shape.heads, 0 if shape.reads_only else shape.key_heads
    both = mx.concatenate(
        [mx.tile(one, (count, 1)) for one, count in zip((queries, keys), counts, strict=True)]
    )
    return shape._replace(norms=QueryKeyNorms(queries, keys, both, 1e-6))


def product_of(heads: HeadShape, tokens: int, seed: int = 50) -> mx.array:
    """A joined product."""
    queries = heads.heads * (2 if heads.gated else 1)
    keys = 0 if heads.reads_only else heads.key_heads * (1 if heads.keys_are_values else 2)
    return numbers((tokens, (queries + keys) * heads.dim), seed, heads.dtype)


_YARN = RotaryEmbedding(64, False, None, 1.0, mx.power(2.0, mx.arange(32) / 3.0), 1.25)
SHAPES = {
    "64 dimensions, normed": head_shape(64, normed=True),
    "128 dimensions": head_shape(128, mx.bfloat16),
    # Those of gpt_oss.
    "sinks": head_shape(64, sinks=numbers((6,), 3, mx.float16), window=20, rotation=_YARN),
    "sinks of all columns": head_shape(64, sinks=numbers((6,), 3, mx.float16), rotation=_YARN),
    # Gemma 3's.
    "256 dimensions in a window": head_shape(256, window=33, normed=True, key_heads=3),
    # Qwen3.5's.
    "gates, partly rotated": head_shape(
        256, normed=True, gated=True, rotation=RotaryEmbedding(64, False, 1e7, 1.0, None, 1.0)
    ),
    # Gemma 4's: values are keys, and have a norm.
    "512 dimensions": head_shape(512, normed=True, keys_are_values=True, value_eps=1e-6, window=300),
    "values with a norm": head_shape(64, value_eps=1e-6, rotation=None),
    # Gemma 2's.
    "capped scores": head_shape(64, cap=2.0, rotation=RotaryEmbedding(64, True, 1e4, 0.5, None, 1.0)),
}


def slots_of(heads: HeadShape, step: Sequence[Tokens]) -> tuple[Slots, list[PlacedPiece]]:
    """Slots of these rows, whose computed columns have the same numbers every time; others are not numbers."""
    slots = Slots([KVShape(heads.key_heads, heads.dim, heads.dtype)], CONTEXT)
    pieces = [PlacedPiece(slots.take(each.capacity), each.computed, each.count, each.shift) for each in step]
    for number, piece in enumerate(pieces):
        slot, computed = piece.slot, piece.start
        assert slot.capacity == step[number].capacity
        for offset, arrays in enumerate((slot.pool.keys, slot.pool.values)):
            seed = 10 + 2 * number + offset
            columns = numbers((heads.key_heads, computed, heads.dim), seed, heads.dtype)
            arrays[0][slot.index, :, :computed] = columns
    return slots, pieces


def by_mlx(heads: HeadShape, pieces: Sequence[PlacedPiece], product: mx.array) -> mx.array:
    """The reference, without padding."""
    positions = np.concatenate([piece.start + piece.shift + np.arange(piece.count) for piece in pieces])
    tokens = len(positions)
    layout = MlxAttention([heads], [0])
    qkv = PlainOps().rotate(product[:tokens], heads, mx.array(positions.astype(np.int32)))
    return layout.attend(layout.begin(pieces, tokens), 0, qkv)


def test_tokens_of_a_prompt_that_is_read_in_part_have_their_own_positions() -> None:
    """Others follow each other, ahead of their columns by a shift or not."""
    slots = Slots([KVShape(2, 64, mx.float16)], CONTEXT)
    pieces = [
        PlacedPiece(slots.take(64), 3, 2, 7),
        PlacedPiece(slots.take(64), 4, 3, positions=np.array([9, 10, 40])),
        PlacedPiece(slots.take(64), 0, 1),
    ]
    table = np.array(
        [(piece.slot.index, piece.start, piece.count, piece.shift) for piece in pieces], np.int32
    )
    places = slot_attention._places(np.zeros(3, np.int32), table, 8, pieces)
    assert places[:, 3].tolist() == [10, 11, 9, 10, 40, 0, -1, -1]
    assert places[:, 2].tolist() == [3, 4, 4, 5, 6, 0, -1, -1]


def host(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


CASES = [
    (shape, step)
    for shape in SHAPES
    for step in STEPS
    if (step != "verify blocks of many columns" if shape in [*SHAPES][:2] else step in FEW)
]


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_rows_attend_as_by_mlx(kernels: str, shape: str, name: str) -> None:
    """To their own columns, in one part or several; and only the columns of new tokens are written."""
    step, padding = STEPS[name], 5
    heads = SHAPES[shape]
    if kernels == "plain_kernels" and heads.dtype == mx.bfloat16:
        # NumPy has no bfloat16.
        heads = head_shape(heads.dim)
    tokens = sum(each.count for each in step)
    product = product_of(heads, tokens + padding)
    expected, pieces = slots_of(heads, step)
    wanted = host(by_mlx(heads, pieces, product))
    slots, pieces = slots_of(heads, step)
    attend = CudaAttention([heads], [0])
    layout = attend.begin(pieces, tokens + padding)
    got = host(attend.attend(layout, 0, [product]))
    columns = min(heads.window or CONTEXT, max(each.computed + each.count for each in step))
    assert layout.kind[0][1] == (4 if columns >= 256 else 1)
    # One rounding of a number of about 1, and some of a product of them.
    tolerance = 0.01 if heads.dtype == mx.float16 else 0.05
    assert np.abs(got[:tokens] - wanted).max() < tolerance
    assert not got[tokens:].any()
    for capacity, pool in slots.pools.items():
        for arrays, others in (
            (pool.keys, expected.pools[capacity].keys),
            (pool.values, expected.pools[capacity].values),
        ):
            assert np.abs(host(arrays[0]) - host(others[0])).max() < tolerance


def test_a_layer_reads_what_another_wrote(kernels: str) -> None:
    """It has queries alone, and writes nothing."""
    heads, reader = head_shape(64, normed=True, window=16), head_shape(64, normed=True, reads_only=True)
    step = STEPS["verify blocks of unlike widths"]
    tokens = sum(each.count for each in step)
    products = [product_of(heads, tokens), product_of(reader, tokens, 51)]
    results = []
    for attend, ops in (
        (MlxAttention([heads, reader], [0, 0]), PlainOps()),
        (CudaAttention([heads, reader], [0, 0]), None),
    ):
        _, pieces = slots_of(heads, step)
        positions = mx.array(
            np.concatenate([piece.start + np.arange(piece.count) for piece in pieces]), mx.int32
        )
        layout: Any = attend.begin(pieces, tokens)
        for layer, (shape, product) in enumerate(zip((heads, reader), products, strict=True)):
            given = [product] if ops is None else ops.rotate(product, shape, positions)
            found = attend.attend(layout, layer, given)
        results.append(host(found))
    assert np.abs(results[0] - results[1]).max() < 0.01


@pytest.mark.parametrize(
    "heads",
    [head_shape(64), head_shape(64, window=4), head_shape(256, window=17), head_shape(512, window=4)],
    ids=lambda heads: f"{heads.dim} dimensions, window {heads.window}",
)
def test_columns_of_no_row_are_not_read(kernels_as_written: None, heads: HeadShape) -> None:
    """Those behind a row, those of other slots, and those before the window: they are not numbers."""
    step = [Tokens(20, 1), Tokens(0, 30), Tokens(40, 5)]
    product = product_of(heads, 36)
    _, pieces = slots_of(heads, step)
    wanted = host(by_mlx(heads, pieces, product))
    slots, pieces = slots_of(heads, step)
    pool = pieces[0].slot.pool
    column = mx.arange(pool.capacity)[None, :]
    starts = mx.array([20, 0, 40])[:, None]
    seen = (column < starts) & (column > starts - (heads.window or CONTEXT))
    for arrays in (pool.keys, pool.values):
        arrays[0] = mx.where(seen[:, None, :, None], arrays[0], mx.array(float("nan"), mx.float16))
    slots.pools[512].replaced()
    attend = CudaAttention([heads], [0])
    got = host(attend.attend(attend.begin(pieces, 36), 0, [product]))
    assert np.abs(got - wanted).max() < 0.01


def test_the_places_of_tokens_and_the_tiles_of_queries() -> None:
    """Of each token its pool, slot, column and position. Of each tile the pool and slot of its row, the column behind
    the last one, the row's tokens, the tile's first query, the row's first token, and whether its warps are apart."""
    heads = head_shape(64)
    _, pieces = slots_of(heads, [Tokens(20, 1, shift=3), Tokens(6, 2), Tokens(0, 30, 1024)])
    layout = CudaAttention([heads], [0]).begin(pieces, 36)
    places, tiles = (np.array(array) for array in (*layout.shared, layout.layers[0][0]))
    rows = [(0, 0, 20, 23), (0, 1, 6, 6), (0, 1, 7, 7), *((1, 0, at, at) for at in range(30))]
    assert places.reshape(-1, 4).tolist() == [*map(list, rows), *[[-1] * 4] * 3]
    assert tiles.reshape(-1, attention.TILE).tolist() == [
        # Three heads of 30 tokens are 90 queries.
        [1, 0, 30, 30, 0, 3, 1],
        [1, 0, 30, 30, 64, 3, 1],
        # Padding is a row without columns.
        [0, 0, 0, 3, 0, 33, 0],
        [0, 1, 8, 2, 0, 1, 0],
        [0, 0, 21, 1, 0, 0, 0],
    ]
    assert layout.kind == ((5, 1),)


def test_a_trace_is_for_tiles_and_parts_of_few_numbers() -> None:
    """Whatever rows and pools there are; tiles without tokens fill up the number."""
    heads = head_shape(64)
    attend = CudaAttention([heads], [0])
    _, pieces = slots_of(heads, [Tokens(5, 1)] * 9)
    layout = attend.begin(pieces, 10)
    assert layout.kind == ((10, 1),)
    assert len(layout.layers[0]) == 1 + 2 * POOLS_MAX
    examples = attend.examples(10)
    assert [example.kind for example in examples] == [((10, 1),), ((10, 4),), ((10, 16),)]
    for one, other in zip(
        [*layout.shared, *layout.layers[0]], [*examples[0].shared, *examples[0].layers[0]], strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    # Many rows fill the device with one part each.
    assert [example.kind for example in attend.examples(256)] == [((256, 1),)]


def test_layers_of_unlike_heads_have_tiles_and_parts_of_their_own() -> None:
    """As few kinds of traces as layers of one kind have: a window never has more parts than a row."""
    wide = head_shape(64)
    narrow = head_shape(64, window=600)
    few = head_shape(512, key_heads=1)
    attend = CudaAttention([wide, narrow, wide, few], [0, 1, 2, 3])
    kinds = [example.kind for example in attend.examples(4)]
    assert kinds == [
        ((4, 1), (4, 1), (4, 1)),
        ((4, 4), (4, 4), (4, 4)),
        ((4, 16), (4, 4), (4, 16)),
    ]
    slots, pieces = slots_of(wide, [Tokens(1500, 1, 2048), *[Tokens(5, 1)] * 3])
    for pool in slots.pools.values():
        pool.keys, pool.values = pool.keys * 4, pool.values * 4
    layout = attend.begin(pieces, 4)
    assert layout.kind == kinds[2]
    assert layout.layers[0][0] is layout.layers[1][0]
    assert layout.layers[3][0] is not layout.layers[0][0]


def test_a_replaced_array_is_found_by_the_next_step(plain_kernels: list[str]) -> None:
    """As after a pool has grown."""
    heads = head_shape(64)
    slots, pieces = slots_of(heads, [Tokens(5, 1)])
    attend = CudaAttention([heads], [0])
    product = numbers((1, 640), 50, mx.float16)
    mx.eval(attend.attend(attend.begin(pieces, 1), 0, [product]))
    before = pieces[0].slot.pool.keys[0]
    slots.take(1)
    mx.eval(attend.attend(attend.begin([replace(pieces[0], start=6)], 1), 0, [product]))
    after = pieces[0].slot.pool.keys[0]
    assert after is not before
    assert host(after)[0, :, 6].any()
    assert not host(before)[0, :, 6].any()


def test_tokens_with_three_positions_are_left_to_mlx(plain_kernels: list[str]) -> None:
    """They come rotated; the steps before and after them use the kernels."""
    heads = head_shape(64)
    attend = CudaAttention([heads], [0])
    product = numbers((12, 640), 50, mx.float16)
    results = []
    for is_turned in (False, True):
        _, (piece,) = slots_of(heads, [Tokens(0, 12)])
        if is_turned:
            first = replace(piece, count=10)
            qkv = PlainOps().rotate(product[:10], heads, mx.arange(10))
            attended = [attend.attend(attend.begin([first], 10), 0, qkv)]
            last = replace(piece, start=10, count=2)
            attended.append(attend.attend(attend.begin([last], 2), 0, [product[10:]]))
            results.append(mx.concatenate(attended))
        else:
            results.append(attend.attend(attend.begin([piece], 12), 0, [product]))
    assert np.abs(host(results[0]) - host(results[1])).max() < 0.01


def test_heads_without_a_kernel_are_left_to_mlx() -> None:
    """All layers, if one is of such a kind; and their slots."""
    heads = head_shape(64)
    ops = CudaOps()
    assert isinstance(ops.attention([heads], [0]), CudaAttention)
    assert ops.storage().writes_in_place
    unlike_rotation = RotaryEmbedding(32, False, 1e4, 1.0, None, 1.0)
    for unlike in (
        head_shape(96),
        heads._replace(dtype=mx.float32),
        heads._replace(heads=5),
        heads._replace(rotation=unlike_rotation),
    ):
        assert isinstance(ops.attention([heads, unlike], [0, 1]), MlxAttention)
        assert type(ops.storage()) is MlxStorage


LAYERS = 4
CALLS_MAX = 5
"""Python and C functions that are called for a layer."""


@pytest.mark.skipif(on_cuda(), reason="the kernels are there")
def test_a_layer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows and pools: the host's time for them was most of such a step on a GPU. Python calls no kernel once
    there is a trace, the attention's of the first step neither where it was traced ahead."""
    called: list[str] = []

    def cuda_kernel(*, name: str, **_: Any) -> Any:
        def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            called.append(name)
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: None)
    cuda_kernels.forget()
    counts = []
    for layers in (LAYERS, 2 * LAYERS):
        model = build_model({**LLAMA, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": layers})
        model.set_dtype(mx.float16)
        decoder = DecoderModel(read_weights(model), CudaOps(), replays=True)
        called.clear()
        decoder.trace([8], float("inf"))
        # The end of the layers is of another kind: two traces for each number of parts.
        kinds = len(decoder.mixing.examples(8))
        assert (
            called.count("rotary_heads")
            == called.count("attention") + called.count("attention_part")
            == 2 * kinds
        )
        slots = Slots(decoder.mixing.shapes, CONTEXT)
        steps = [
            [PlacedPiece(slots.take(each.capacity), each.computed, each.count) for each in step]
            for step in ([Tokens(9, 1)] * 8, [Tokens(20, 1)] * 5 + [Tokens(3, 1, 1024)] * 3)
        ]
        forward(decoder, steps[0])
        called.clear()
        _, calls = calls_of(partial(forward, decoder, steps[1]))
        assert not called
        counts.append(calls)
    cuda_kernels.forget()
    of_layer = (counts[1] - counts[0]) / LAYERS
    print(f"{of_layer:.0f} calls a layer")
    assert of_layer <= CALLS_MAX


def forward(decoder: DecoderModel, pieces: Sequence[PlacedPiece]) -> mx.array:
    """Hidden states of a step of these rows, a token of each."""
    count = len(pieces)
    inputs = Inputs(
        mx.zeros((count,), mx.uint32), mx.zeros((count,), mx.int32), mx.arange(count, dtype=mx.int32)
    )
    hidden: mx.array = decoder.forward(inputs, decoder.mixing.begin(pieces, count)).last
    return hidden
