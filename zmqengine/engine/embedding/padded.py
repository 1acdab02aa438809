"""Texts of different lengths as a rectangle, for devices on which a padded token takes less time than an operation."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.embedding.packing import split_heads


class Padded:
    """A `TextBatch` whose texts are padded to one length, in operations that depend on its shape alone.

    `ids` (texts, tokens); `lengths` (texts, 1); `second` (texts, 1): where the second text of a pair begins, 0 for a
    single text, None if all are. Padding has states, which nothing else depends on.
    """

    def __init__(self, ids: mx.array, lengths: mx.array, second: mx.array | None = None) -> None:
        self._texts, self._longest = ids.shape
        self.ids = ids.reshape(-1)
        # Arrays of a shape: a trace holds their values.
        columns = np.arange(self._longest, dtype=np.int32)
        self._columns = mx.array(columns)
        self.positions = mx.array(np.tile(columns, self._texts))
        self._lengths = lengths
        self._second = second
        self._inside = self._columns < self._lengths
        self._masks: dict[tuple[int | None, int, mx.Dtype], mx.array] = {}

    @property
    def types(self) -> mx.array | None:
        if self._second is None:
            return None
        in_second = (self._second > 0) & (self._columns >= self._second)
        return in_second.astype(mx.int32).reshape(-1)

    def heads(self, states: mx.array, counts: Sequence[int]) -> list[mx.array]:
        return split_heads(states, self._texts, counts)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        window: int | None = None,
        slopes: mx.array | None = None,
    ) -> mx.array:
        if window is not None and window >= self._longest - 1:
            window = None
        key = (window, queries.shape[1], queries.dtype)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._mask(*key, slopes)
        attended = attention_in_products(queries, keys, values, scale=scale, mask=mask)
        return attended.transpose(0, 2, 1, 3).reshape(len(self.ids), -1)

    def _mask(self, window: int | None, heads: int, dtype: mx.Dtype, slopes: mx.array | None) -> mx.array:
        """Terms of the scores (texts, heads, tokens, tokens)."""
        inside = self._inside[:, None, None, :]
        terms = mx.array(0.0, dtype)
        if window is not None or slopes is not None:
            distances = mx.abs(self._columns[:, None] - self._columns[None])
            if window is not None:
                # Padding attends to its text: a row without a key has no softmax.
                near = (distances <= window) | (self._columns[:, None] >= self._lengths[:, :, None])[:, None]
                inside = inside & near
            if slopes is not None:
                terms = (-slopes[:, None, None] * distances).astype(dtype)
        masked = mx.where(inside, terms, mx.array(-mx.inf, dtype))
        return mx.broadcast_to(masked, (self._texts, heads, self._longest, self._longest))

    def first(self, states: mx.array) -> mx.array:
        return self._rows(states)[:, 0]

    def last(self, states: mx.array) -> mx.array:
        return mx.take_along_axis(self._rows(states), self._lengths[:, :, None] - 1, axis=1)[:, 0]

    def mean(self, states: mx.array) -> mx.array:
        rows = self._rows(states.astype(mx.float32))
        return mx.where(self._inside[:, :, None], rows, 0).sum(axis=1) / self._lengths

    def most(self, states: mx.array) -> mx.array:
        return mx.where(self._inside[:, :, None], self._rows(states), -mx.inf).max(axis=1)

    def _rows(self, states: mx.array) -> mx.array:
        return states.reshape(self._texts, self._longest, -1)


def attention_in_products(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array
) -> mx.array:
    """Attention with terms of scores for a `mask`, of all of its shape, in the fewest operations of a GPU.

    Where MLX has no kernel for float32, as on CUDA and on Metal for heads of 32, it makes seven operations. Here they
    are four: scale and mask are a product's own.
    """
    attend = mx.fast.scaled_dot_product_attention
    if queries.dtype != mx.float32 or keys.shape[1] != queries.shape[1]:
        return attend(queries, keys, values, scale=scale, mask=mask)
    try:
        return attend(queries, keys, values, scale=scale, mask=mask, force_fused=True)
    except ValueError:
        # There is no kernel for this shape.
        pass
    return mx.softmax(mx.addmm(mask, queries, keys.swapaxes(-1, -2), alpha=scale), axis=-1) @ values
