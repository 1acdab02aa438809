"""Attention of all segments of a packed step on CUDA: two kernels a layer, whatever their number.

Each segment has its own arrays of keys and values. The kernels take the arrays of all, and a table made once a step:
the place of each token in them, and the queries and columns of each thread block. Alone, a segment takes two kernels a
layer and a copy of its output, for which the host needs longer than the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.cuda import attention
from zmqengine.engine.cuda.attention_in_place import may_write
from zmqengine.engine.cuda.between_products import rotate_packed, rotates
from zmqengine.engine.cuda.kernel import Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.models.decoder_weights import HeadShape
from zmqengine.engine.models.few_sizes import few_sizes
from zmqengine.engine.models.ops import StepAttention

SEGMENTS = 8
"""Maximum segments of a step. Fewer pass the arrays of the first for the others: a kernel is compiled once."""

# Numbers of a row of the two tables.
_PLACE, _TILE = 4, 8


class _Rows(NamedTuple):
    """Rows of one width in the arrays of a segment; an array has a number for each.

    `row`: index in the arrays. `first`, `stop`: the first column, and the one behind the newest tokens. `position` and
    `token`: of the first new token, in the row and in the step.
    """

    segment: int
    width: int
    row: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    position: np.ndarray
    token: np.ndarray


class TracedPacked:
    """`PackedAttention` by these kernels; the kind is the number of tiles, and of parts of a row's columns."""

    def __init__(self, layers: Sequence[HeadShape]) -> None:
        self._layers = layers
        self._group = layers[0].heads // layers[0].key_heads

    def step(
        self, segments: Sequence[tuple[list[Any], int | Sequence[int]]], tokens: int
    ) -> StepAttention | None:
        """See `PackedAttention`. None unless every segment is written in place, or for too many."""
        if len(segments) > SEGMENTS:
            return None
        widths = [width if isinstance(width, int) else sum(width) for _, width in segments]
        for (caches, _), width in zip(segments, widths, strict=True):
            if not all(map(may_write, self._layers, caches, repeat(width))):
                return None
        rows: list[_Rows] = []
        used = 0
        for number, (caches, lengths) in enumerate(segments):
            own = _rows(number, caches[0], lengths, used)
            used += sum(each.width * len(each.row) for each in own)
            rows += own
        tiles = _tiles([*rows, _unused(used, tokens)], self._group)
        count = few_sizes(len(tiles))
        # A trace is for one size: tokens without a place, and tiles without tokens.
        tiles = np.concatenate([tiles, np.zeros((count - len(tiles), _TILE), np.int32)])
        table = resident(mx.array(np.concatenate([_places(rows, tokens).ravel(), tiles.ravel()])))
        blocks = count + (attention.WARPS - 1) * int(tiles[:, 7].sum())
        columns = max(int((each.stop - each.first).max()) for each in rows)
        parts = attention.parts_of(blocks * self._layers[0].key_heads, columns)
        marks = [_marks(caches[0]) for caches, _ in segments]
        unused = SEGMENTS - len(segments)
        shared = [table[: tokens * _PLACE], table[tokens * _PLACE :], *marks, *marks[:1] * unused]
        arrays, wrote = [], []
        for of_layer in zip(*(caches for caches, _ in segments), strict=True):
            corners = [array for cache in of_layer for array in cache.corners]
            arrays.append(corners + corners[:2] * unused)
            wrote.append(partial(_wrote, of_layer, widths))
        return StepAttention((count, parts), shared, arrays, wrote)

    def attend(self, kind: Any, heads: HeadShape, product: mx.array, *arrays: mx.array) -> mx.array:
        """See `PackedAttention`."""
        count, parts = kind
        tokens = product.shape[0]
        places, tiles, *rest = arrays
        marks, keys_values = rest[:SEGMENTS], rest[SEGMENTS:]
        queries = rotate_packed(heads, product, places, keys_values)
        inputs = [queries, tiles, attention.scalar(heads.scale)]
        for keys, values, hidden in zip(keys_values[::2], keys_values[1::2], marks, strict=True):
            inputs += [keys, values, hidden]
        variants = _variants(heads.dtype, heads.heads, heads.key_heads, heads.dim)[parts]
        each, made = (tokens, heads.heads), (tokens, heads.heads * heads.dim)
        call = attention.in_parts(variants, (count * heads.key_heads, 1), parts, each, heads.dim, made)
        return call(inputs)


def supports(layers: Sequence[HeadShape]) -> bool:
    """Whether the kernels support all of these layers."""
    group = layers[0].heads // layers[0].key_heads
    return all(
        heads.window is None
        and heads.heads == group * heads.key_heads
        and rotates(heads)
        and attention.by_tensor_cores(heads.dtype, heads.dim)
        for heads in layers
    )


def _wrote(caches: Sequence[Any], widths: Sequence[int], done: mx.array) -> bool:
    """Note in the caches of a layer that `done` writes them; returns whether the device should start on it."""
    starts_now = False
    for cache, width in zip(caches, widths, strict=True):
        starts_now |= cache.wrote_in_place(width, done)
    return starts_now


def _rows(segment: int, cache: Any, width: int | Sequence[int], token: int) -> list[_Rows]:
    """The rows of a segment whose first token is `token` of the step; texts side by side, by their lengths."""
    if not isinstance(width, int):
        lengths = np.array(width, np.int32)
        start = np.cumsum(lengths, dtype=np.int32) - lengths
        found = []
        for length in np.unique(lengths).tolist():
            own = start[lengths == length]
            first, zero = cache.offset + own, np.zeros_like(own)
            found.append(_Rows(segment, length, zero, first, first + length, zero, token + own))
        return found
    if type(cache) is kv.RowKVCache:
        firsts, stop, positions = [0], cache.offset + width, [cache.offset]
    else:
        layout = cache.layout
        firsts, stop = layout.padding, layout.columns
        positions = [length - width for length in layout.lengths]
    row = np.arange(len(firsts), dtype=np.int32)
    first, position = np.array(firsts, np.int32), np.array(positions, np.int32)
    return [_Rows(segment, width, row, first, np.full_like(row, stop), position, token + width * row)]


def _unused(used: int, tokens: int) -> _Rows:
    """Padding of a step: a row without columns."""
    zero = np.zeros(1, np.int32)
    return _Rows(0, tokens - used, zero, zero, zero, zero, zero + used)


def _marks(cache: Any) -> mx.array:
    """The marks of columns to leave out, of the first row and column."""
    hidden = None if type(cache) is kv.RowKVCache else cache.layout.spans().hidden
    return attention.nothing() if hidden is None else hidden[:1, :1]


def _places(rows: Sequence[_Rows], tokens: int) -> np.ndarray:
    """Segment, row, column and position of each token."""
    places = np.full((tokens, _PLACE), -1, np.int32)
    for each in rows:
        ahead = np.arange(each.width, dtype=np.int32)
        own = np.empty((len(each.row), each.width, _PLACE), np.int32)
        own[..., 0] = each.segment
        own[..., 1] = each.row[:, None]
        own[..., 2] = (each.stop - each.width)[:, None] + ahead
        own[..., 3] = each.position[:, None] + ahead
        places[each.token[:, None] + ahead] = own
    return places


def _tiles(rows: Sequence[_Rows], group: int) -> np.ndarray:
    """The table of window_packed.cu."""
    every: list[np.ndarray] = []
    for each in rows:
        step = attention.block_queries(group * each.width)
        queries = np.arange(0, group * each.width, step)
        tiles = np.empty((len(each.row), len(queries), _TILE), np.int32)
        tiles[..., 0] = each.segment
        tiles[..., 1] = each.row[:, None]
        tiles[..., 2] = each.first[:, None]
        tiles[..., 3] = each.stop[:, None]
        tiles[..., 4] = each.width
        tiles[..., 5] = queries
        tiles[..., 6] = each.token[:, None]
        tiles[..., 7] = step > attention.block_queries(1)
        every.append(tiles.reshape(-1, _TILE))
    # Tiles of prompts come first, since they take longest.
    return np.concatenate(every[::-1])


@lru_cache(maxsize=16)
def _variants(dtype: mx.Dtype, heads: int, key_heads: int, dim: int) -> Mapping[int, tuple[Variant, Variant]]:
    """The kernel by number of parts, as `attention.by_parts`."""
    inputs: list[tuple[str, mx.Dtype]] = [("q", dtype), ("tiles", mx.int32), ("scale", mx.float32)]
    for number in range(SEGMENTS):
        inputs += [(f"k{number}", dtype), (f"v{number}", dtype), (f"hidden{number}", mx.uint8)]
    begin = for_each(kernel_text("window_packed.cu"), SEGMENTS)
    template = ("H", heads), ("KH", key_heads)
    kernel = attention.window_kernel("packed_attention", dtype, dim, tuple(inputs), begin, template)
    return attention.by_parts(kernel, dtype, dim)
