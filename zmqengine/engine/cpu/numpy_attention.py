"""Attention over slots through NumPy, in float32; heads with the same keys share a product."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.attention import PlacedPiece, PoolLayout, PromptPiece, ShortRows, layout_of
from zmqengine.engine.models.layers import HeadShape

Array: TypeAlias = Any

# Added to scores of columns that a token does not see. Finite: a slot that sees nothing must not become NaN.
_UNSEEN = np.float32(-1e30)
# Tokens of a prompt that attend at once: their scores stay in a core's cache for prompts of a few thousand tokens.
_BLOCK_TOKENS = 64
_CAUSAL = np.triu(np.full((_BLOCK_TOKENS, _BLOCK_TOKENS), _UNSEEN, np.float32), 1)


class NumpyStorage:
    """`SlotStorage` in arrays of NumPy, which are written at once."""

    on_mlx = writes_in_place = False
    # The system gives memory to what is written alone: more slots cost nothing, and growth is a copy.
    slots_least = 32

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> Array:
        """See `SlotStorage`. A mapping of its own: malloc would clear all of a block that was in use before."""
        pages = mmap.mmap(-1, 4 * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.float32).reshape(shape)

    def joined(self, first: Array, second: Array) -> Array:
        """See `SlotStorage`."""
        return np.concatenate([first, second])

    def chosen(self, array: Array, slots: Sequence[int]) -> Array:
        """See `SlotStorage`."""
        return array[list(slots)]

    def read(self, arrays: Sequence[Array], index: int, start: int, end: int) -> mx.array:
        """See `SlotStorage`."""
        return mx.array(np.stack([array[index : index + 1, :, start:end] for array in arrays]))

    def write(self, arrays: Sequence[Array], index: int, start: int, columns: mx.array) -> None:
        """See `SlotStorage`."""
        stop = start + columns.shape[-2]
        for array, array_columns in zip(arrays, np.asarray(columns), strict=True):
            array[index : index + 1, :, start:stop] = array_columns

    def clear(self, arrays: Sequence[Array], index: int) -> None:
        """See `SlotStorage`."""
        for array in arrays:
            array[index] = 0


class NumpyAttention:
    """`SlotAttention` through NumPy."""

    is_replayed = False

    def __init__(self, heads: Sequence[HeadShape]) -> None:
        self._heads = heads

    def begin(
        self, pieces: Sequence[PlacedPiece], tokens: int
    ) -> list[tuple[PoolLayout, dict[int | None, Array]]]:
        """See `SlotAttention`. Each pool has what to add to scores of its short rows, by window."""
        windows = dict.fromkeys(each.window for each in self._heads)
        return [
            (
                layout,
                {window: _unseen(layout.short, window) for window in windows if layout.short is not None},
            )
            for layout in layout_of(pieces)
        ]

    def attend(
        self, layout: list[tuple[PoolLayout, dict[int | None, Array]]], layer: int, qkv: Sequence[Array]
    ) -> Array:
        """See `SlotAttention`."""
        heads = self._heads[layer]
        queries, keys, values = qkv
        attended = np.empty((len(queries), heads.heads * heads.dim), np.float32)
        # A row that is not a number stays alone, and is noticed by its logits.
        with np.errstate(all="ignore"):
            for pool, unseen in layout:
                all_keys, all_values = pool.pool.keys[layer], pool.pool.values[layer]
                all_keys[pool.slots, :, pool.columns] = keys[pool.tokens]
                all_values[pool.slots, :, pool.columns] = values[pool.tokens]
                outputs = attended[pool.tokens]
                if pool.short is not None:
                    _attend_short(
                        queries[pool.tokens], all_keys, all_values, heads, pool, unseen[heads.window], outputs
                    )
                for piece in pool.prompts:
                    _attend_prompt(queries[pool.tokens], all_keys, all_values, heads, piece, outputs)
        return attended


def _unseen(short: ShortRows, window: int | None) -> Array:
    """Numbers to add to scores [slots, width, columns]."""
    columns = np.arange(int(short.last.max()) + 1)
    seen = columns <= short.last[..., None]
    if window is not None:
        seen &= columns > short.last[..., None] - window
    return np.where(seen, np.float32(0), _UNSEEN)


def _attend_short(
    queries: Array,
    keys: Array,
    values: Array,
    heads: HeadShape,
    pool: PoolLayout,
    unseen: Array,
    outputs: Array,
) -> None:
    """Attention of the short rows of a pool into `outputs` [tokens, heads * dim]."""
    short = pool.short
    assert short is not None
    rows, width = short.tokens.shape
    columns = unseen.shape[-1]
    group = heads.heads // heads.key_heads
    # [slots, key heads, group * width, dim]
    chosen = queries[short.tokens] * np.float32(heads.scale)
    grouped = chosen.reshape(rows, width, heads.key_heads, group, heads.dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, heads.key_heads, group * width, heads.dim)
    read = keys[:rows, :, :columns], values[:rows, :, :columns]
    # BLAS multiplies many columns by a few queries up to four times as fast as these by those.
    scores = np.ascontiguousarray((read[0] @ grouped.swapaxes(-1, -2)).swapaxes(-1, -2))
    by_head = scores.reshape(rows, heads.key_heads, group, width, columns)
    by_head += unseen[:, None, None]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    attended = scores @ read[1]
    attended /= scores.sum(axis=-1, keepdims=True)
    by_token = attended.reshape(rows, heads.key_heads, group, width, heads.dim).transpose(0, 3, 1, 2, 4)
    by_token = by_token.reshape(rows * width, -1)
    count = sum(piece.count for piece in pool.prompts)
    short_tokens = len(pool.slots) - count
    outputs[:short_tokens] = by_token[pool.place[:short_tokens]]


def _attend_prompt(
    queries: Array, keys: Array, values: Array, heads: HeadShape, piece: PromptPiece, outputs: Array
) -> None:
    """Attention of a piece of a prompt into `outputs` [tokens, heads * dim], block by block of its tokens."""
    group, dim = heads.heads // heads.key_heads, heads.dim
    end = piece.start + piece.count
    room = np.empty(group * _BLOCK_TOKENS * end, np.float32)
    for key_head in range(heads.key_heads):
        own = slice(key_head * group, (key_head + 1) * group)
        for begin in range(0, piece.count, _BLOCK_TOKENS):
            tokens = min(_BLOCK_TOKENS, piece.count - begin)
            stop = piece.start + begin + tokens
            first = 0 if heads.window is None else max(0, stop - tokens - heads.window + 1)
            at = piece.tokens + begin
            scaled = (queries[at : at + tokens, own].swapaxes(0, 1) * np.float32(heads.scale)).reshape(
                -1, dim
            )
            scores = room[: group * tokens * (stop - first)].reshape(-1, stop - first)
            np.matmul(scaled, keys[piece.slot, key_head, first:stop].T, out=scores)
            by_head = scores.reshape(group, tokens, stop - first)
            if heads.window is None:
                by_head[..., -tokens:] += _CAUSAL[:tokens, :tokens]
            else:
                by_head += _hidden(tokens, stop - first, heads.window)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            attended = scores @ values[piece.slot, key_head, first:stop]
            attended /= scores.sum(axis=-1, keepdims=True)
            by_token = outputs[at : at + tokens].reshape(tokens, heads.heads, dim)
            by_token[:, own] = attended.reshape(group, tokens, dim).swapaxes(0, 1)


def _hidden(tokens: int, columns: int, window: int) -> Array:
    """Numbers to add to scores [tokens, columns] of the last `tokens` of as many columns, in a window."""
    last = np.arange(columns - tokens, columns)[:, None]
    column = np.arange(columns)
    return np.where((column <= last) & (column > last - window), np.float32(0), _UNSEEN)
