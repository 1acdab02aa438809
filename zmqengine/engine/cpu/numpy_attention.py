"""Attention over slots through NumPy, in float32; heads with the same keys share a product."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.eight_bits import PackedColumns, packed
from zmqengine.engine.models.attention import PlacedPiece, PoolLayout, PromptPiece, ShortRows, layout_of
from zmqengine.engine.models.layers import HeadShape

Array: TypeAlias = Any

# Added to scores of columns that a token does not see. Finite: a slot that sees nothing must not become NaN.
_UNSEEN = np.float32(-1e30)
# Tokens of a prompt that attend at once: their scores stay in a core's cache for prompts of a few thousand tokens.
_BLOCK_TOKENS = 64
# Columns in 8 bits that are widened at once, into a core's cache. A step of 25m behind 16,000 columns took 21.0 ms,
# with 256 of them 22.7, with 128 25.9.
_BLOCK_COLUMNS = 512
_CAUSAL = np.triu(np.full((_BLOCK_TOKENS, _BLOCK_TOKENS), _UNSEEN, np.float32), 1)


class NumpyStorage:
    """`SlotStorage` in arrays of NumPy, which are written at once."""

    on_mlx = writes_in_place = False
    # The system gives memory to what is written alone: more slots cost nothing, and growth is a copy.
    slots_least = 32

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> Array:
        """See `SlotStorage`. A mapping of its own: malloc would clear all of a block that was in use before."""
        count = math.prod(shape)
        pages = mmap.mmap(-1, 4 * max(1, count), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint32 if dtype == mx.uint32 else np.float32, count).reshape(shape)

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
    reads_packed = True

    def __init__(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> None:
        self._heads = heads
        self._caches = caches

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
        heads, cache = self._heads[layer], self._caches[layer]
        queries, *keys_values = qkv
        attended = np.empty((len(queries), heads.outputs), np.float32)
        # A row that is not a number stays alone, and is noticed by its logits.
        with np.errstate(all="ignore"):
            for pool, unseen in layout:
                all_keys, all_values = pool.pool.keys[cache], pool.pool.values[cache]
                for array, columns in zip((all_keys, all_values), keys_values, strict=False):
                    _write(array, pool, columns[pool.tokens])
                if heads.value_dims is not None:
                    all_values = all_keys[..., -heads.value_dims :]
                outputs = attended[pool.tokens]
                if pool.short is not None:
                    _attend_short(
                        queries[pool.tokens], all_keys, all_values, heads, pool, unseen[heads.window], outputs
                    )
                for piece in pool.prompts:
                    _attend_prompt(queries[pool.tokens], all_keys, all_values, heads, piece, outputs)
        return attended


def _write(array: Array, pool: PoolLayout, numbers: Array) -> None:
    """Write keys or values [tokens, heads, dim] of a pool's tokens into its slots."""
    if isinstance(array, PackedColumns):
        made = packed(mx.array(numbers), array.group_size)
        mx.eval(made)
        for part, part_numbers in zip(array, made, strict=True):
            part[pool.slots, :, pool.columns] = np.asarray(part_numbers)
    else:
        array[pool.slots, :, pool.columns] = numbers


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
    ends = short.last.max(axis=1) + 1
    scores = _scores(grouped, keys, ends, columns)
    by_head = scores.reshape(rows, heads.key_heads, group, width, columns)
    if heads.cap is not None:
        scores[...] = capped(scores, heads.cap)
    by_head += unseen[:, None, None]
    sinks = None
    if heads.sinks is not None:
        sinks = np.repeat(heads.sinks, width).reshape(1, heads.key_heads, group * width, 1)
    total = _to_powers(scores, sinks)
    attended = _sums(scores, values, ends)
    attended /= total
    by_token = attended.reshape(rows, heads.key_heads, group, width, -1).transpose(0, 3, 1, 2, 4)
    by_token = by_token.reshape(rows * width, -1)
    count = sum(piece.count for piece in pool.prompts)
    short_tokens = len(pool.slots) - count
    outputs[:short_tokens] = by_token[pool.place[:short_tokens]]


def _scores(queries: Array, keys: Array, ends: Array, columns: int) -> Array:
    """Products [rows, key heads, queries, columns] of queries with the keys of rows, of which each has columns up to
    its end."""
    rows, heads, count, _ = queries.shape
    if not isinstance(keys, PackedColumns):
        # BLAS multiplies many columns by a few queries up to four times as fast as these by those.
        by_column = keys[:rows, :, :columns] @ queries.swapaxes(-1, -2)
        return np.ascontiguousarray(by_column.swapaxes(-1, -2))
    # A key is code * scale + bias in each group: its product with a query that of the codes * scale + bias * the
    # query's sum.
    by_group = queries.reshape(rows, heads, count, -1, keys.group_size).swapaxes(2, 3)
    groups = by_group.shape[2]
    scores = np.zeros((rows, heads, groups, count, columns), np.float32)
    for row, block, codes in _blocks(keys, ends):
        by_column = codes @ by_group[row].swapaxes(-1, -2)
        scores[row, ..., block] = by_column.swapaxes(-1, -2)
    scales, biases = (part[:rows, :, :columns].swapaxes(2, 3)[..., None, :] for part in keys[1:])
    scores *= scales
    scores += by_group.sum(axis=-1, keepdims=True) * biases
    return scores[:, :, 0] if groups == 1 else scores.sum(axis=2)


def _sums(shares: Array, values: Array, ends: Array) -> Array:
    """Sums [rows, key heads, queries, dim] of the values of rows, weighted by shares
    [rows, key heads, queries, columns]."""
    rows, heads, count, columns = shares.shape
    if not isinstance(values, PackedColumns):
        return shares @ values[:rows, :, :columns]
    scales, biases = (part[:rows, :, :columns] for part in values[1:])
    groups = scales.shape[-1]
    scaled = shares[:, :, None] * scales.swapaxes(2, 3)[..., None, :]
    sums = np.empty((rows, heads, groups, count, values.group_size), np.float32)
    sums[:] = (shares @ biases).swapaxes(2, 3)[..., None]
    for row, block, codes in _blocks(values, ends):
        sums[row] += scaled[row, ..., block] @ codes
    return sums.swapaxes(2, 3).reshape(rows, heads, count, -1)


def _blocks(array: PackedColumns, ends: Array) -> Iterator[tuple[int, slice, Array]]:
    """The codes [heads, groups, columns, size] of rows in float32, up to the end of each, by row and block of columns.
    Valid until the next."""
    codes = array.numbers.view(np.uint8)
    _, heads, _, dim = codes.shape
    room = np.empty((heads, _BLOCK_COLUMNS, dim), np.float32)
    for row, end in enumerate(ends.tolist()):
        for begin in range(0, end, _BLOCK_COLUMNS):
            block = slice(begin, min(begin + _BLOCK_COLUMNS, end))
            wide = room[:, : block.stop - begin]
            wide[:] = codes[row, :, block]
            yield row, block, wide.reshape(heads, block.stop - begin, -1, array.group_size).swapaxes(1, 2)


def _columns_of(array: Array, slot: int, head: int, end: int) -> Array:
    """The first columns [end, dim] of a head of one slot, with all bits."""
    if not isinstance(array, PackedColumns):
        return array[slot, head, :end]
    numbers, scales, biases = (part[slot, head, :end] for part in array)
    wide = numbers.view(np.uint8).astype(np.float32)
    by_group = wide.reshape(end, -1, array.group_size)
    by_group *= scales[..., None]
    by_group += biases[..., None]
    return wide


def _attend_prompt(
    queries: Array, keys: Array, values: Array, heads: HeadShape, piece: PromptPiece, outputs: Array
) -> None:
    """Attention of a piece of a prompt into `outputs` [tokens, heads * dim], block by block of its tokens."""
    group, dim = heads.heads // heads.key_heads, heads.dim
    end = piece.start + piece.count
    room = np.empty(group * _BLOCK_TOKENS * end, np.float32)
    for key_head in range(heads.key_heads):
        own = slice(key_head * group, (key_head + 1) * group)
        head_keys, head_values = (_columns_of(array, piece.slot, key_head, end) for array in (keys, values))
        for begin in range(0, piece.count, _BLOCK_TOKENS):
            tokens = min(_BLOCK_TOKENS, piece.count - begin)
            stop = piece.start + begin + tokens
            first = 0 if heads.window is None else max(0, stop - tokens - heads.window + 1)
            at = piece.tokens + begin
            scaled = (queries[at : at + tokens, own].swapaxes(0, 1) * np.float32(heads.scale)).reshape(
                -1, dim
            )
            scores = room[: group * tokens * (stop - first)].reshape(-1, stop - first)
            np.matmul(scaled, head_keys[first:stop].T, out=scores)
            if heads.cap is not None:
                scores[...] = capped(scores, heads.cap)
            by_head = scores.reshape(group, tokens, stop - first)
            if heads.window is None:
                by_head[..., -tokens:] += _CAUSAL[:tokens, :tokens]
            else:
                by_head += _hidden(tokens, stop - first, heads.window)
            sinks = None if heads.sinks is None else np.repeat(heads.sinks[own], tokens)[:, None]
            total = _to_powers(scores, sinks)
            attended = scores @ head_values[first:stop]
            attended /= total
            by_token = outputs[at : at + tokens].reshape(tokens, heads.heads, -1)
            by_token[:, own] = attended.reshape(group, tokens, -1).swapaxes(0, 1)


def _to_powers(scores: Array, sinks: Array | None) -> Array:
    """Change scores to shares, but for the factor that is returned. `sinks`: logits that join the softmax."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    return total if sinks is None else total + np.exp(sinks - top)


def capped(numbers: Array, cap: float) -> Array:
    """Numbers bounded smoothly by +-`cap`."""
    return np.tanh(numbers / np.float32(cap)) * np.float32(cap)


def _hidden(tokens: int, columns: int, window: int) -> Array:
    """Numbers to add to scores [tokens, columns] of the last `tokens` of as many columns, in a window."""
    last = np.arange(columns - tokens, columns)[:, None]
    column = np.arange(columns)
    return np.where((column <= last) & (column > last - window), np.float32(0), _UNSEEN)
