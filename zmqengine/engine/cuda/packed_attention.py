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


class _Span(NamedTuple):
    """Columns of a segment's rows: the first column of each row, the column behind the newest tokens, the position of
    each row's first new token, and marks of columns to leave out."""

    first: Sequence[int]
    stop: int
    positions: Sequence[int]
    hidden: mx.array | None


class TracedPacked:
    """`PackedAttention` by these kernels; the kind is the number of tiles, and of parts of a row's columns."""

    def __init__(self, layers: Sequence[HeadShape]) -> None:
        self._layers = layers
        self._group = layers[0].heads // layers[0].key_heads

    def step(self, segments: Sequence[tuple[list[Any], int]], tokens: int) -> StepAttention | None:
        """See `PackedAttention`. None unless every segment is written in place, or for too many."""
        if len(segments) > SEGMENTS:
            return None
        for caches, width in segments:
            if not all(map(may_write, self._layers, caches, repeat(width))):
                return None
        spans = [_span(caches[0], width) for caches, width in segments]
        widths = [width for _, width in segments]
        places = [_places(*each) for each in zip(range(SEGMENTS), spans, widths, strict=False)]
        unused = tokens - sum(map(len, places))
        tiles = _tiles(spans, widths, unused, self._group)
        count = few_sizes(len(tiles))
        # A trace is for one size: tokens without a place, and tiles without tokens.
        places.append(np.full((unused, _PLACE), -1, np.int32))
        tiles = np.concatenate([tiles, np.zeros((count - len(tiles), _TILE), np.int32)])
        table = resident(mx.array(np.concatenate([*map(np.ravel, places), tiles.ravel()])))
        blocks = count + (attention.WARPS - 1) * int(tiles[:, 7].sum())
        parts = attention.parts_of(blocks * self._layers[0].key_heads, max(span.stop for span in spans))
        marks = [attention.nothing() if span.hidden is None else span.hidden[:1, :1] for span in spans]
        each_segment = [*range(len(segments)), *[0] * (SEGMENTS - len(segments))]
        shared = [
            table[: tokens * _PLACE],
            table[tokens * _PLACE :],
            *(marks[place] for place in each_segment),
        ]
        arrays, wrote = [], []
        for number in range(len(self._layers)):
            caches = [of_segment[number] for of_segment, _ in segments]
            corners = [cache.corners for cache in caches]
            arrays.append([array for place in each_segment for array in corners[place]])
            wrote.append(partial(_wrote, caches, widths))
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


def _span(cache: Any, width: int) -> _Span:
    if type(cache) is kv.RowKVCache:
        return _Span([0], cache.offset + width, [cache.offset], None)
    layout = cache.layout
    return _Span(
        layout.padding, layout.columns, [length - width for length in layout.lengths], layout.spans().hidden
    )


def _places(segment: int, span: _Span, width: int) -> np.ndarray:
    """Segment, row, column and position of each token."""
    rows, ahead = len(span.first), np.arange(width)
    places = np.empty((rows, width, _PLACE), np.int32)
    places[..., 0] = segment
    places[..., 1] = np.arange(rows)[:, None]
    places[..., 2] = span.stop - width + ahead
    places[..., 3] = np.array(span.positions)[:, None] + ahead
    return places.reshape(-1, _PLACE)


def _tiles(spans: Sequence[_Span], widths: Sequence[int], padding: int, group: int) -> np.ndarray:
    """The table of window_packed.cu. Padding is a row without columns."""
    rows_alike = [*zip(range(SEGMENTS), spans, widths, strict=False), (0, _Span([0], 0, [0], None), padding)]
    every: list[np.ndarray] = []
    token = 0
    for segment, span, width in rows_alike:
        rows, step = len(span.first), attention.block_queries(group * width)
        queries = np.arange(0, group * width, step)
        tiles = np.zeros((rows, len(queries), _TILE), np.int32)
        tiles[..., 0] = segment
        tiles[..., 1] = np.arange(rows)[:, None]
        tiles[..., 2] = np.array(span.first)[:, None]
        tiles[..., 3] = span.stop
        tiles[..., 4] = width
        tiles[..., 5] = queries
        tiles[..., 6] = token + width * np.arange(rows)[:, None]
        tiles[..., 7] = step > attention.block_queries(1)
        every.append(tiles.reshape(-1, _TILE))
        token += rows * width
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
