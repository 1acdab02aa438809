"""Attention of all segments of a packed step on CUDA: two kernels a layer, whatever their number.

Each segment has its own arrays of keys and values. The kernels take the arrays of all, and a table made once a step:
the place of each token in them, and the queries and columns of each thread block. Alone, a segment takes two kernels a
layer and a copy of its output, for which the host needs longer than the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.cuda import attention
from zmqengine.engine.cuda.between_products import rotate_packed, rotates
from zmqengine.engine.cuda.kernel import Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.models.decoder_weights import HeadShape

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


class PackedAttention:
    """The attention of a packed step of `segments`, (caches, width) each, padded to `tokens`."""

    def __init__(
        self,
        layers: Sequence[HeadShape],
        segments: Sequence[tuple[list[Any], int]],
        spans: Sequence[_Span],
        tokens: int,
    ) -> None:
        self._layers = layers
        self._segments = segments
        self._padded = tokens
        self._tokens = sum(len(span.first) * width for span, (_, width) in zip(spans, segments, strict=True))
        self._columns = max(span.stop for span in spans)
        widths = [width for _, width in segments]
        places = np.concatenate(
            [_places(*each) for each in zip(range(SEGMENTS), spans, widths, strict=False)]
        )
        tiles = _tiles(spans, widths, tokens - self._tokens, layers[0].heads // layers[0].key_heads)
        self._tiles_count = len(tiles)
        table = resident(mx.array(np.concatenate([places.ravel(), tiles.ravel()])))
        self._places, self._tiles = table[: places.size], table[places.size :]
        hidden = [attention.nothing() if span.hidden is None else span.hidden for span in spans]
        self._hidden = hidden + hidden[:1] * (SEGMENTS - len(hidden))

    def __call__(self, number: int, product: mx.array) -> mx.array:
        """Write the keys and values of a layer in place, and attend.

        Takes the layer's product [padded tokens, outputs]; returns [padded tokens, heads * dim], zeros for padding.
        """
        heads = self._layers[number]
        caches = [segment[number] for segment, _ in self._segments]
        arrays = [(cache.keys, cache.values) for cache in caches]
        arrays += arrays[:1] * (SEGMENTS - len(arrays))
        queries = rotate_packed(
            heads, product, self._places, self._tokens, [array for pair in arrays for array in pair]
        )
        attended = self._attend(heads, queries, arrays)
        starts_now = False
        for cache, (_, width) in zip(caches, self._segments, strict=True):
            if type(cache) is kv.RowKVCache:
                cache.wrote_in_place(width, queries)
            elif cache.wrote_in_place():
                starts_now = True
        if starts_now:
            kv.start(attended)
        return attended

    def _attend(
        self, heads: HeadShape, queries: mx.array, arrays: Sequence[tuple[mx.array, mx.array]]
    ) -> mx.array:
        blocks = self._tiles_count * heads.key_heads
        parts = attention.parts_of(blocks, self._columns)
        first, join = _variants(heads.dtype, heads.heads, heads.key_heads, heads.dim)[parts]
        inputs = [queries, self._tiles, attention.scalar(heads.scale)]
        for (keys, values), hidden in zip(arrays, self._hidden, strict=True):
            inputs += [keys, values, hidden]
        grid: dict[str, Any] = {
            "grid": (blocks * attention.WARPS * 32, 1, parts),
            "threadgroup": (attention.WARPS * 32, 1, 1),
        }
        made = (self._padded, heads.heads * heads.dim)
        if parts == 1:
            return first(inputs=inputs, output_shapes=[made], **grid)[0]
        sums = first(inputs=inputs, output_shapes=[(self._padded, heads.heads, parts, heads.dim + 2)], **grid)
        return join(
            inputs=sums,
            grid=(self._padded * heads.heads * heads.dim, 1, 1),
            threadgroup=(heads.dim, 1, 1),
            output_shapes=[made],
        )[0]


def attend_packed(
    layers: Sequence[HeadShape], segments: Sequence[tuple[list[Any], int]], tokens: int
) -> PackedAttention | None:
    """The attention of these segments, (caches, width) each; None where the kernels do not support one of them."""
    group = layers[0].heads // layers[0].key_heads
    if len(segments) > SEGMENTS or not all(_is_supported(heads, group) for heads in layers):
        return None
    spans = []
    for caches, width in segments:
        if not all(_has_room(heads, cache, width) for heads, cache in zip(layers, caches, strict=True)):
            return None
        spans.append(_span(caches[0], width))
    return PackedAttention(layers, segments, spans, tokens)


@lru_cache(maxsize=1024)
def _is_supported(heads: HeadShape, group: int) -> bool:
    if heads.heads != group * heads.key_heads:
        return False
    return heads.window is None and rotates(heads) and attention.by_tensor_cores(heads.dtype, heads.dim)


def _has_room(heads: HeadShape, cache: Any, width: int) -> bool:
    """Whether `width` columns of each row may be written in place."""
    if type(cache) is kv.RowKVCache:
        return cache.has_room(width)
    return type(cache) is kv.RaggedKVCache and cache.can_write_here(width, heads.dtype)


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
        rows, queries = len(span.first), np.arange(0, group * width, attention.WINDOW_QUERIES)
        tiles = np.zeros((rows, len(queries), _TILE), np.int32)
        tiles[..., 0] = segment
        tiles[..., 1] = np.arange(rows)[:, None]
        tiles[..., 2] = np.array(span.first)[:, None]
        tiles[..., 3] = span.stop
        tiles[..., 4] = width
        tiles[..., 5] = queries
        tiles[..., 6] = token + width * np.arange(rows)[:, None]
        every.append(tiles.reshape(-1, _TILE))
        token += rows * width
    return np.concatenate(every)


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
