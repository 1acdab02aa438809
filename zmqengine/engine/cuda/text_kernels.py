"""Look-ups, attention, pools and products of texts one after the other, in float32 on CUDA, each in one kernel.

MLX has no kernel for all of attention there: with the copies that its products make of heads, it launches seven or
eight. Its products are cuBLAS's, which takes the host twice the time of a kernel. Those here round factors to TF32.
All layers of a BERT are one kernel: the host launches it in a tenth of the time of one for each operation.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.attention import WARPS, scalar
from zmqengine.engine.cuda.between_products import bits_of
from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import WORDS
from zmqengine.engine.host.cuda_driver import multiprocessors
from zmqengine.engine.models.text_ops import EmbeddedTokens, LayerStack, NormOfSums, Tables

_LANES = 32
_THREADS = 128
# Threads of a block of look-ups: it reads the table of eight tokens, the 32 bytes that are read at least from the host.
_EMBED_THREADS = 256
# Threads of a block of the product, and its shared memory: two fit on an H200, and one on every device of compute
# capability 8 or more, which has 99 KiB.
_PRODUCT_THREADS, _RING_BYTES = 256, 72 << 10
# Columns that a statistic of sums is of.
_GROUP = 8
# Floats that a lane loads at a time.
_FOUR = 4
# A lane keeps a query and the sums for it in registers, of which it has 255.
_DIM_MAX = 64
# More than any text has tokens.
_NO_WINDOW = 1 << 30


class Tile(NamedTuple):
    """The part of a product that a thread block computes, and the warps that share its rows, columns and factors."""

    rows: int
    columns: int
    row_warps: int
    column_warps: int
    factor_warps: int

    @classmethod
    def of(cls, count: int, outputs: int) -> Tile:
        """The tile for `count` rows: the smallest of which each multiprocessor has one at most, or the largest.

        Up to a power of two it is the same: kernels are compiled when they are timed, for powers of two.
        """
        count = max(_ROWS_MIN, 1 << (count - 1).bit_length())
        for tile in _TILES:
            if -(-count // tile.rows) * -(-outputs // tile.columns) <= multiprocessors():
                return tile
        return _TILES[-1]

    @property
    def stages(self) -> int:
        """Parts of the factors in shared memory: as in text_product.cu."""
        part = max(32, 16 * self.factor_warps)
        return _RING_BYTES // (4 * part * (self.rows + self.columns))


# Fewer rows have the tiles of this number.
_ROWS_MIN = 32
# In ascending order.
_TILES = (
    Tile(16, 8, 1, 1, 8), Tile(16, 16, 1, 1, 8), Tile(32, 16, 1, 1, 8), Tile(32, 32, 2, 1, 4), Tile(64, 32, 2, 1, 4),
    Tile(64, 64, 2, 2, 2), Tile(128, 64, 4, 2, 1),
)  # fmt: skip


def embed(tokens: mx.array, texts: mx.array, tables: Tables) -> EmbeddedTokens:
    """Embedded `tokens`, and what other kernels read of the tables. `tokens` and `texts` are those of `Ragged`."""
    count = tokens.shape[1]
    ends = [2 * count, 3 * count, 3 * count + texts.size]
    words, positions, first, types, weight, bias, eps = tables
    width, nothing = words.shape[1], scalar(0.0)
    given = [nothing if array is None else array for array in (positions, types, weight, bias)]
    has = positions is not None, types is not None, bias is not None
    states, copied = _embed(width, first, has, eps)(
        inputs=[tokens, texts, words, *given],
        grid=(-(-count * _LANES // _EMBED_THREADS) * _EMBED_THREADS, 1, 1),
        threadgroup=(_EMBED_THREADS, 1, 1),
        output_shapes=[(count, width), (max(WORDS, ends[-1] + 1),)],
    )
    return EmbeddedTokens(states, *mx.split(copied[: ends[-1] + 1], ends))


def supports(dim: int) -> bool:
    """Whether `attend` supports heads with `dim` dimensions."""
    return dim % _FOUR == 0 and dim <= _DIM_MAX


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spans: mx.array,
    *,
    scale: float,
    window: int | None,
    slopes: mx.array | None,
) -> mx.array:
    """Attention of each token to its text, from arrays [tokens, heads, 1, dim] of float32; [tokens, heads * dim].

    `spans` [2 * tokens]: the first token of each token's text, then the one behind its last. `window` and `slopes` are
    those of `TextBatch.attend`.
    """
    count, heads, _, dim = queries.shape
    variant = _attention(dim, _NO_WINDOW if window is None else window, slopes is not None)
    (attended,) = variant(
        inputs=[queries, keys, values, spans, scalar(0.0) if slopes is None else slopes, scalar(scale)],
        grid=(-(-count // _LANES) * WARPS * _LANES, heads, 1),
        threadgroup=(WARPS * _LANES, 1, 1),
        output_shapes=[(count, heads * dim)],
    )
    return attended


def stacks(stack: LayerStack) -> bool:
    """Whether `layers` supports such layers, on this device."""
    width, inner = stack.out_weight.shape[1], stack.up_weight.shape[1]
    floats = all(array.dtype == mx.float32 for array in stack[2:])
    fits = multiplies(width) and multiplies(inner) and sums_up(width) and supports(width // stack.heads)
    return floats and fits and multiprocessors() > 0


def layers(states: mx.array, spans: mx.array, arrivals: mx.array, stack: LayerStack) -> mx.array:
    """The sums [tokens, width] before the last norm, of `states` [tokens, width]; `spans` as `attend` has them.

    One kernel, whose blocks wait for one another: each has a multiprocessor. `arrivals` [1]: a 0, which it counts up.
    """
    count, width = states.shape
    inner = stack.up_weight.shape[1]
    tiles = tuple(Tile.of(count, outputs) for outputs in (3 * width, width, inner))
    variant = _layers(width, inner, width // stack.heads, tiles, stack.eps)
    scratch = count * (5 * width + inner + 4 * (width // _GROUP))
    made, _ = variant(
        inputs=[states, spans, arrivals, *stack[2:]],
        grid=(multiprocessors() * _PRODUCT_THREADS, 1, 1),
        threadgroup=(_PRODUCT_THREADS, 1, 1),
        output_shapes=[(count, width), (scratch,)],
    )
    return made


def pool(states: mx.array, texts: mx.array, *, largest: bool) -> mx.array:
    """The mean of the `states` [tokens, width] of each text, or the `largest` in every column; [texts, width].

    `texts` [2 * texts]: the first token of each, then the one behind its last.
    """
    count, width = texts.shape[0] // 2, states.shape[1]
    (pooled,) = _pool(largest)(
        inputs=[states, texts],
        grid=(count * _THREADS, -(-width // _THREADS), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count, width)],
    )
    return pooled


def deliver(vectors: mx.array, memory: mx.array) -> mx.array:
    """An array [1] that is computed once the `vectors` [texts, width] are in `memory`, a longer array of the host."""
    (done,) = _deliver()(
        inputs=[vectors, memory],
        grid=(-(-vectors.size // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
    )
    return done


def multiplies(inputs: int) -> bool:
    """Whether `multiply` supports rows of `inputs` numbers."""
    return inputs % _FOUR == 0


def multiply(
    rows: mx.array,
    weights: mx.array,
    bias: mx.array | None,
    *,
    added: mx.array | None = None,
    gelu: bool = False,
    norm: NormOfSums | None = None,
) -> mx.array:
    """The product of `rows` [count, inputs] with `weights`, a view [inputs, outputs] of an array [outputs, inputs].

    The `bias` [outputs] is added first, then GELU is applied if asked for, then `added` [count, outputs]. The `norm`
    applies to `added`, or without it to the rows.
    """
    return _multiply(rows, weights, bias, added, norm, gelu=gelu, told=False)[0]


def sums_up(outputs: int) -> bool:
    """Whether `sum_up` supports products of `outputs` columns."""
    return outputs % _GROUP == 0


def sum_up(
    rows: mx.array, weights: mx.array, bias: mx.array | None, added: mx.array, norm: NormOfSums | None
) -> tuple[mx.array, mx.array]:
    """`multiply`, and the statistics of the sums for `NormOfSums`."""
    made, stats = _multiply(rows, weights, bias, added, norm, gelu=False, told=True)
    return made, stats


def _multiply(
    rows: mx.array,
    weights: mx.array,
    bias: mx.array | None,
    added: mx.array | None,
    norm: NormOfSums | None,
    *,
    gelu: bool,
    told: bool,
) -> list[mx.array]:
    count, outputs = rows.shape[0], weights.shape[1]
    tile = Tile.of(count, outputs)
    nothing = scalar(0.0)
    eps = None if norm is None else norm.eps
    variant = _product(tile, rows.shape[1], bias is not None, gelu, added is not None, eps, told)
    return variant(
        inputs=[
            rows,
            weights,
            nothing if bias is None else bias,
            nothing if added is None else added,
            *((nothing,) * 3 if norm is None else norm[:3]),
        ],
        grid=(-(-outputs // tile.columns) * _PRODUCT_THREADS, -(-count // tile.rows), 1),
        threadgroup=(_PRODUCT_THREADS, 1, 1),
        output_shapes=[(count, outputs), *[(count, outputs // _GROUP, 2)] * told],
    )


@cache
def _embed(width: int, first: int, has: tuple[bool, bool, bool], eps: float) -> Variant:
    names = ["tokens", "texts", "words", "positions", "types", "norm_weight", "norm_bias"]
    kernel = Kernel(
        name="text_embed",
        input_names=names,
        output_names=["out", "copied"],
        source=kernel_text("text_embed.cu"),
        ensure_row_contiguous=False,
    )
    positions, types, biased = has
    template = [
        ("W", width), ("FIRST", first), ("POSITIONS", positions), ("TYPES", types), ("BIASED", biased),
        ("EPS", bits_of(eps)), ("THREADS", _EMBED_THREADS),
    ]  # fmt: skip
    return kernel.variant(template, [mx.int32] * 2 + [mx.float32] * 5, [mx.float32, mx.int32])


@cache
def _attention(dim: int, window: int, sloped: bool) -> Variant:
    kernel = Kernel(
        name="text_attention",
        input_names=["q", "k", "v", "spans", "slopes", "scale"],
        output_names=["out"],
        source=kernel_text("text_attention.cu"),
        header=kernel_text("ragged_attention.cuh", "four.cuh", "text_attention_tile.cuh"),
        ensure_row_contiguous=False,
    )
    template = [("D", dim), ("WARPS", WARPS), ("WINDOW", window), ("SLOPED", sloped)]
    floats = [mx.float32] * 3
    return kernel.variant(template, [*floats, mx.int32, mx.float32, mx.float32], [mx.float32])


@cache
def _product(
    tile: Tile, inputs: int, biased: bool, gelu: bool, added: bool, eps: float | None, told: bool
) -> Variant:
    names = ["rows", "weights", "bias", "added", "stats", "norm_weight", "norm_bias"]
    kernel = Kernel(
        name="text_product_told" if told else "text_product",
        input_names=names,
        output_names=["out", "told"] if told else ["out"],
        source=("" if told else "float* told = nullptr;\n") + kernel_text("text_product.cu"),
        header=_product_header(),
        ensure_row_contiguous=False,
        shared_memory=_RING_BYTES,
    )
    template = [
        ("ROWS", tile.rows), ("COLUMNS", tile.columns), ("K", inputs), ("BIAS", biased), ("GELU", gelu),
        ("ADDED", added), ("NORMED", eps is not None), ("EPS", bits_of(eps or 0.0)), ("TOLD", told),
    ]  # fmt: skip
    return kernel.variant(template, [mx.float32] * len(names), [mx.float32] * (1 + told))


@cache
def _layers(width: int, inner: int, dim: int, tiles: tuple[Tile, ...], eps: float) -> Variant:
    names = ["states", "spans", "arrivals", *LayerStack._fields[2:]]
    kernel = Kernel(
        name="text_layers",
        input_names=names,
        output_names=["out", "scratch"],
        source=kernel_text("text_layers.cu"),
        header=_product_header() + kernel_text("ragged_attention.cuh", "text_attention_tile.cuh"),
        ensure_row_contiguous=False,
        shared_memory=_RING_BYTES,
    )
    sides = [
        (f"{product}_{side}", getattr(tile, side.lower()))
        for product, tile in zip(("QKV", "OUT", "UP"), tiles, strict=True)
        for side in ("ROWS", "COLUMNS")
    ]
    numbers = [("W", width), ("F", inner), ("D", dim), ("EPS", bits_of(eps)), ("SCALE", bits_of(dim**-0.5))]
    types = [mx.float32, mx.int32, mx.int32, *[mx.float32] * (len(names) - 3)]
    return kernel.variant(numbers + sides, types, [mx.float32] * 2)


def _product_header() -> str:
    tiles = "".join(
        f"template <> struct Tile<{tile.rows}, {tile.columns}> {{ static constexpr int ROWS = {tile.rows}, "
        f"COLUMNS = {tile.columns}, ROW_WARPS = {tile.row_warps}, COLUMN_WARPS = {tile.column_warps}, "
        f"K_WARPS = {tile.factor_warps}, STAGES = {tile.stages}; }};\n"
        for tile in _TILES
    )
    instructions = kernel_text("copies_ahead.cuh") + kernel_text("text_product.cuh", "four.cuh")
    declared = f"template <int, int> struct Tile;\n{tiles}"
    return instructions + declared + kernel_text("text_product_tile.cuh")


@cache
def _pool(largest: bool) -> Variant:
    kernel = Kernel(
        name="text_pool",
        input_names=["states", "texts"],
        output_names=["out"],
        source=kernel_text("text_pool.cu"),
    )
    return kernel.variant([("THREADS", _THREADS), ("LARGEST", largest)], [mx.float32, mx.int32], [mx.float32])


@cache
def _deliver() -> Variant:
    kernel = Kernel(
        name="text_deliver",
        input_names=["vectors", "memory"],
        output_names=["done"],
        source=kernel_text("text_deliver.cu"),
    )
    return kernel.variant([("THREADS", _THREADS)], [mx.float32] * 2, [mx.float32])
