"""Texts of different lengths in one batch: tokens in a row without padding, which only attention sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import mlx.core as mx
import numpy as np

from zmqengine.checkpoint.encoder_batch import SCORES_BYTES_MAX
from zmqengine.engine.embedding.backend import Attention


class Packed:
    """A `TextBatch` without padding: `heads` pads to the longest text, and `attend` cuts the padding off."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        second: Sequence[int] = (),
        attention: Attention = mx.fast.scaled_dot_product_attention,
    ) -> None:
        self._attention = attention
        lengths = np.array([len(text) for text in texts])
        self.lengths = lengths
        self.starts = np.cumsum(lengths) - lengths
        self.longest = int(lengths.max())
        self.is_even = bool((lengths == self.longest).all())
        positions = np.arange(int(lengths.sum())) - np.repeat(self.starts, lengths)
        self.ids = mx.array(np.fromiter(chain.from_iterable(texts), np.uint32, len(positions)))
        self.positions = mx.array(positions.astype(np.uint32))
        self.types: mx.array | None = None
        if any(second):
            where = np.array(second)
            in_second = (positions >= np.repeat(where, lengths)) & np.repeat(where > 0, lengths)
            self.types = mx.array(in_second.astype(np.uint32))
        self._valid: mx.array | None = None
        if not self.is_even:
            columns = np.arange(self.longest)
            # Padding repeats a text's first token, whose key the mask leaves out.
            inside = columns[None] < lengths[:, None]
            self._padded = mx.array(
                np.where(inside, self.starts[:, None] + columns[None], self.starts[:, None])
            )
            self._back = mx.array(np.flatnonzero(inside.ravel()).astype(np.uint32))
            self._valid = mx.array(inside[:, None, None, :])

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
        texts, heads, longest, width = queries.shape
        rows = max(1, min(longest, SCORES_BYTES_MAX // (4 * texts * heads * longest)))
        parts = []
        for start in range(0, longest, rows):
            mask = self._mask(start, min(longest, start + rows), window, slopes)
            if mask is not None and mask.dtype != mx.bool_:
                mask = mask.astype(queries.dtype)
            part = queries[:, :, start : start + rows]
            parts.append(self._attention(part, keys, values, scale=scale, mask=mask))
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        flat = joined.transpose(0, 2, 1, 3).reshape(texts * longest, heads * width)
        return flat if self.is_even else flat[self._back]

    def _mask(self, start: int, stop: int, window: int | None, slopes: mx.array | None) -> mx.array | None:
        """Keys that queries from `start` to `stop` attend to, or terms of their scores; None for all keys."""
        mask = self._valid
        window = None if window is None or window >= self.longest else window
        if window is None and slopes is None:
            return mask
        distances = mx.abs(mx.arange(start, stop)[:, None] - mx.arange(self.longest)[None])
        if window is not None:
            near = (distances <= window)[None, None]
            mask = near if mask is None else mask & near
        if slopes is None:
            return mask
        lost = -slopes[:, None, None] * distances
        return lost[None] if mask is None else mx.where(mask, lost, mx.array(-mx.inf, lost.dtype))

    def heads(self, states: mx.array, counts: Sequence[int]) -> list[mx.array]:
        """(tokens, sum of `counts` * width) as arrays (texts, count, tokens of the longest, width)."""
        rows = states if self.is_even else states[self._padded]
        return split_heads(rows, len(self.lengths), counts)

    def first(self, states: mx.array) -> mx.array:
        """The states of each text's first token."""
        return states[mx.array(self.starts)]

    def last(self, states: mx.array) -> mx.array:
        """The states of each text's last token."""
        return states[mx.array(self.starts + self.lengths - 1)]

    def mean(self, states: mx.array) -> mx.array:
        """The mean state of each text, in float32."""
        lengths = mx.array(self.lengths)[:, None].astype(mx.float32)
        return self._sums(states.astype(mx.float32)) / lengths

    def most(self, states: mx.array) -> mx.array:
        """The largest value of each text in every column."""
        pieces = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return mx.stack([states[start : start + length].max(axis=0) for start, length in pieces])

    def _sums(self, states: mx.array) -> mx.array:
        texts = len(self.lengths)
        if self.is_even:
            return states.reshape(texts, self.longest, -1).sum(axis=1)
        owner = mx.array(np.repeat(np.arange(texts), self.lengths))
        return mx.zeros((texts, states.shape[-1]), states.dtype).at[owner].add(states)


def split_heads(states: mx.array, texts: int, counts: Sequence[int]) -> list[mx.array]:
    """States of texts of one length as arrays (texts, count, tokens, width), one for each of `counts`."""
    rows = states.reshape(texts, -1, sum(counts), states.shape[-1] // sum(counts)).transpose(0, 2, 1, 3)
    return list(mx.split(rows, list(accumulate(counts))[:-1], axis=1))
