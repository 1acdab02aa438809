"""Attention on CUDA that writes keys and values into the cache's arrays, and its place in the trace of a layer.

Each call of a kernel takes the host some 15 us, most of it in MLX's Python binding; in a replayed trace, 1 us. So where
all layers of a step are written in place, the attention of a layer is traced with the computation that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.cuda import attention
from zmqengine.engine.cuda.between_products import rotate_into, rotates
from zmqengine.engine.models.decoder_weights import HeadShape
from zmqengine.engine.models.ops import StepAttention


def appends(heads: HeadShape, width: int) -> bool:
    """Whether a kernel writes `width` columns of these heads in place, and another attends to them."""
    return heads.window is None and rotates(heads) and attention.supports(heads.dtype, heads.dim, width)


def may_write(heads: HeadShape, cache: Any, width: int) -> bool:
    """Whether `width` columns of each row may be written into the arrays of `cache`."""
    return type(cache) in (kv.RaggedKVCache, kv.RowKVCache) and cache.can_write_here(width, heads.dtype)


def attend_in_place(
    heads: HeadShape,
    product: mx.array,
    offset: mx.array,
    keys: mx.array,
    values: mx.array,
    spans: Sequence[mx.array],
    parts: int,
    *,
    flat: bool = False,
) -> tuple[mx.array, mx.array]:
    """Queries of a layer's `product` [rows * width, outputs], and its attention as `attention.attend` has it.

    Whatever depends on the queries is computed after keys and values were written.
    """
    width = product.shape[0] // offset.shape[0]
    queries = rotate_into(heads, product, offset, width, keys, values, spans[1])
    return queries, attention.attend(queries, keys, values, spans, heads.scale, parts, flat=flat)


class TracedInPlace:
    """`TracedAttention` by these kernels; the kind is the number of parts of a row's columns.

    For each of `layers`, `appends` is true up to `attention.ROW_WIDTH_MAX`.
    """

    def __init__(self, layers: Sequence[HeadShape]) -> None:
        self._layers = layers

    def step(self, caches: Sequence[Any], width: int, offset: mx.array) -> StepAttention | None:
        """See `TracedAttention`. None unless every layer may be written in place."""
        assert width <= attention.ROW_WIDTH_MAX, "`appends` was asked for rows up to this width"
        for heads, cache in zip(self._layers, caches, strict=True):
            if type(cache) is not kv.RaggedKVCache or not cache.can_write_here(width, heads.dtype):
                return None
        spans = caches[0].layout.spans()
        starts, stop, marks = attention.arrays_of(spans)
        parts = attention.parts_of_rows(*self._queries(offset.shape[0], width), spans.columns)
        # The shapes of keys, values and marks change, and a trace is for one shape: it takes the first row and column.
        shared = [offset, starts, stop, marks[:1, :1]]
        layers = [[*cache.corners] for cache in caches]
        return StepAttention(
            parts, shared, layers, [partial(cache.wrote_in_place, width) for cache in caches]
        )

    def examples(self, rows: int, width: int) -> list[StepAttention]:
        """See `TracedAttention`."""
        each_row = mx.zeros((rows,), mx.int32)
        shared = [each_row, each_row, each_row[:1], attention.nothing()]
        layers = [[mx.zeros((1, each.key_heads, 1, each.dim), each.dtype)] * 2 for each in self._layers]
        every_parts = attention.every_parts_of_rows(*self._queries(rows, width))
        return [StepAttention(parts, shared, layers, []) for parts in every_parts]

    def attend(self, kind: int, heads: HeadShape, product: mx.array, *arrays: mx.array) -> mx.array:
        """See `TracedAttention`."""
        offset, *spans, keys, values = arrays
        return attend_in_place(heads, product, offset, keys, values, spans, kind, flat=True)[1]

    def _queries(self, rows: int, width: int) -> tuple[mx.Dtype, tuple[int, ...], int]:
        """Type and shape of the first layer's queries, and its key heads. The parts that suit it are those of all."""
        first = self._layers[0]
        return first.dtype, (rows, first.heads, width, first.dim), first.key_heads
