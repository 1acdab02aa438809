"""Attention of a step over the slots of its rows.

The tokens of all pieces are one flat list, [tokens, ...]. Where each of them lies is worked out on the host, once a
step for all layers: `layout_of`. Pieces of few tokens (decode, verify blocks) attend together, one call a pool; a piece
of a prompt attends in a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.eight_bits import BITS, PackedColumns, by_part, packed, widened
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import Slot, SlotPool
from zmqengine.engine.models.layers import HeadShape
from zmqengine.engine.row import Row

WIDTH_MAX = 8
"""Maximum tokens of a piece that attends together with others: as many as a verify block has."""
_QUERIES_MIN = 16
# Columns read are a multiple of this share of a slot's capacity: few shapes, and at most a quarter too many.
_COLUMN_STEPS = 4


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """The `count` tokens of a piece, from column `start` of their slot on. `shift`: how far positions are ahead.

    `positions`: those of its tokens, where they do not follow each other. `verifies`: some of its tokens are draft
    tokens; `row` knows how many count once the step has landed. `sees_all`: its tokens, at most `WIDTH_MAX`, see each
    other, not those before alone.
    """

    slot: Slot
    start: int
    count: int
    shift: int = 0
    row: Row | None = None
    verifies: bool = False
    sees_all: bool = False
    positions: np.ndarray | None = None

    def accepted(self) -> int:
        """Tokens of the piece that count."""
        assert self.row is not None, "the row is known where states follow its tokens"
        return min(self.count, max(0, self.row.computed_tokens - self.start))


class ShortRows(NamedTuple):
    """Short pieces of a pool, padded to one width over its first slots.

    `tokens` [slots, width]: index of each token in the pool's tokens, 0 for padding. `last` [slots, width]: the last
    column that it sees. `columns`: columns that are read.
    """

    tokens: np.ndarray
    last: np.ndarray
    columns: int


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A long piece. `tokens`: index of its first token in the pool's tokens; `columns`: columns that are read."""

    slot: int
    tokens: int
    start: int
    count: int
    columns: int


class PoolLayout(NamedTuple):
    """The pieces in slots of one pool: `tokens` of the step, and the slot and column of each."""

    pool: SlotPool
    tokens: slice
    slots: np.ndarray
    columns: np.ndarray
    short: ShortRows | None
    prompts: list[PromptPiece]
    place: np.ndarray
    """Index of each token in the concatenated outputs of the short rows, [slots * width], and of every prompt,
    [`padded(count)`]."""


class SlotAttention(Protocol):
    """Attention of a back-end, over the slots of one model."""

    is_replayed: bool
    """Whether `attend` is a function of arrays alone, which a trace may contain."""

    @property
    def reads_packed(self) -> bool:
        """Whether it writes and reads columns in 8 bits."""
        ...

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> Any:
        """The layout of a step of these pieces, ordered by pool, padded to `tokens`; for the other methods."""
        ...

    def attend(self, layout: Any, layer: int, qkv: Sequence[Any]) -> Any:
        """Write keys and values of a layer, and attend: [tokens, heads * dim] of queries, keys and values
        [tokens, heads, dim]."""
        ...


def padded(count: int) -> int:
    """Queries that a piece of a prompt is padded to: a power of two, since cuDNN plans each shape for 50 ms."""
    return max(_QUERIES_MIN, 1 << (count - 1).bit_length())


def layout_of(pieces: Sequence[PlacedPiece]) -> list[PoolLayout]:
    """The layouts of the pools that have pieces."""
    layouts: list[PoolLayout] = []
    first = 0
    while first < len(pieces):
        pool = pieces[first].slot.pool
        end = first
        while end < len(pieces) and pieces[end].slot.pool is pool:
            end += 1
        begin = layouts[-1].tokens.stop if layouts else 0
        layouts.append(_pool_layout(pool, pieces[first:end], begin))
        first = end
    return layouts


def _pool_layout(pool: SlotPool, pieces: Sequence[PlacedPiece], begin: int) -> PoolLayout:
    counts = [piece.count for piece in pieces]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    slots = np.repeat([piece.slot.index for piece in pieces], counts).astype(np.int32)
    columns = np.concatenate([piece.start + np.arange(piece.count) for piece in pieces]).astype(np.int32)
    place = np.zeros(total, np.int32)
    short = [
        (piece, int(end) - piece.count)
        for piece, end in zip(pieces, ends, strict=True)
        if piece.count <= WIDTH_MAX
    ]
    rows = None
    outputs = 0
    if short:
        width = max(piece.count for piece, _ in short)
        used = min(few_sizes(1 + max(piece.slot.index for piece, _ in short)), pool.rows)
        tokens = np.zeros((used, width), np.int32)
        last = np.zeros((used, width), np.int32)
        for piece, at in short:
            index = piece.slot.index
            ahead = np.minimum(np.arange(width), piece.count - 1)
            tokens[index] = at + ahead
            last[index] = piece.start + (piece.count - 1 if piece.sees_all else ahead)
            place[at : at + piece.count] = index * width + np.arange(piece.count)
        outputs = used * width
        rows = ShortRows(tokens, last, _columns(pool, int(last.max()) + 1))
    prompts = []
    for piece, end in zip(pieces, ends, strict=True):
        if piece.count > WIDTH_MAX:
            at = int(end) - piece.count
            read = _columns(pool, piece.start + piece.count)
            prompts.append(PromptPiece(piece.slot.index, at, piece.start, piece.count, read))
            place[at : at + piece.count] = outputs + np.arange(piece.count)
            outputs += padded(piece.count)
    return PoolLayout(pool, slice(begin, begin + total), slots, columns, rows, prompts, place)


def _columns(pool: SlotPool, needed: int) -> int:
    step = pool.capacity // _COLUMN_STEPS
    return min(pool.capacity, -(-needed // step) * step)


class MlxPool(NamedTuple):
    """A `PoolLayout` on the device. `short`: the tokens of the short rows, None where they are all tokens in order.

    `masks` by window, to be added to scores: of the short rows [slots, 1, width, columns], then of each prompt
    [1, 1, queries, columns].
    """

    layout: PoolLayout
    slots: mx.array
    columns: mx.array
    short: mx.array | None
    prompts: list[mx.array]
    masks: dict[int | None, list[mx.array]]


class _MlxLayout(NamedTuple):
    pools: list[MlxPool]
    place: mx.array | None
    """Index of each token of the step in the outputs of all pools; None where they are in order."""


class MlxAttention:
    """`SlotAttention` by documented MLX operations, on every device.

    `is_fused`: MLX's fused attention takes a mask where a row has one token, as on Metal. On CUDA it would fall back to
    twice as many operations as `_attend_unfused`.
    """

    is_replayed = False

    def __init__(self, heads: Sequence[HeadShape], caches: Sequence[int], *, is_fused: bool = True) -> None:
        self._heads = heads
        self._caches = caches
        self._is_fused = is_fused
        self._windows = list(dict.fromkeys(each.window for each in heads))

    @property
    def reads_packed(self) -> bool:
        """See `SlotAttention`. Not on CUDA, where MLX would compile a kernel for each shape of a product."""
        return self._is_fused

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> Any:
        """See `SlotAttention`."""
        pools = []
        places = []
        outputs = 0
        for layout in layout_of(pieces):
            places.append(outputs + layout.place)
            outputs += 0 if layout.short is None else layout.short.tokens.size
            outputs += sum(padded(piece.count) for piece in layout.prompts)
            pools.append(self._pool(layout))
        place = np.concatenate(places)
        place = np.concatenate([place, np.zeros(tokens - len(place), np.int32)])
        in_order = outputs == tokens and bool((place == np.arange(tokens)).all())
        return _MlxLayout(pools, None if in_order else mx.array(place))

    def _pool(self, layout: PoolLayout) -> MlxPool:
        short = layout.short
        index = None
        if short is not None:
            flat = short.tokens.ravel()
            # No look-up where the short rows are all tokens, in order.
            in_order = not layout.prompts and np.array_equal(flat, np.arange(len(layout.slots)))
            index = None if in_order else mx.array(flat)
        queries = [
            mx.array(piece.tokens + np.minimum(np.arange(padded(piece.count)), piece.count - 1))
            for piece in layout.prompts
        ]
        dtype = self._heads[0].dtype
        masks = {window: _masks(layout, window, dtype) for window in self._windows}
        return MlxPool(layout, mx.array(layout.slots), mx.array(layout.columns), index, queries, masks)

    def attend(self, layout: _MlxLayout, layer: int, qkv: Sequence[mx.array]) -> mx.array:
        """See `SlotAttention`."""
        outputs = self._outputs(layout.pools, layer, qkv)
        every = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return every if layout.place is None else every[layout.place]

    def _outputs(self, pools: Sequence[MlxPool], layer: int, qkv: Sequence[mx.array]) -> list[mx.array]:
        """Write keys and values, and attend: the outputs of the short rows of each pool, then of its prompts."""
        heads, cache = self._heads[layer], self._caches[layer]
        outputs: list[mx.array] = []
        for pool in pools:
            queries, *keys_values = qkv
            if len(pools) > 1 or len(pool.layout.slots) < len(queries):
                queries, *keys_values = (array[pool.layout.tokens] for array in qkv)
            all_keys, all_values = pool.layout.pool.keys[cache], pool.layout.pool.values[cache]
            # Neither of them, or keys alone, for some layers.
            for array, numbers in zip((all_keys, all_values), keys_values, strict=False):
                _write(array, pool, numbers)
            if heads.value_dims is not None:
                all_values = all_keys[..., -heads.value_dims :]
            masks = iter(pool.masks[heads.window])
            if (short := pool.layout.short) is not None:
                rows, width = short.tokens.shape
                chosen = queries if pool.short is None else queries[pool.short]
                read = partial(_read, slice(rows), short.columns)
                chosen = chosen.reshape(rows, width, heads.heads, heads.dim).swapaxes(1, 2)
                is_fused = (self._is_fused or width > 1) and not isinstance(all_keys, PackedColumns)
                attend = _attend if is_fused else _attend_unfused
                attended = attend(chosen, read(all_keys), read(all_values), heads, next(masks))
                outputs.append(attended.swapaxes(1, 2).reshape(rows * width, -1))
            for piece, index in zip(pool.layout.prompts, pool.prompts, strict=True):
                # In 8 bits, too: many queries repay a copy with all bits, and their scores need not exist at once.
                slot = slice(piece.slot, piece.slot + 1)
                keys, values = (
                    widened(_read(slot, piece.columns, array)) for array in (all_keys, all_values)
                )
                chosen = queries[index].swapaxes(0, 1)[None]
                attended = _attend(chosen, keys, values, heads, next(masks))
                outputs.append(attended[0].swapaxes(0, 1).reshape(index.size, -1))
        return outputs


def _write(array: Any, pool: MlxPool, numbers: mx.array) -> None:
    """Write keys or values [tokens, heads, dim] of a pool's tokens into its slots."""
    if isinstance(array, PackedColumns):
        for part, part_numbers in zip(array, packed(numbers, array.group_size), strict=True):
            part[pool.slots, :, pool.columns] = part_numbers
    else:
        array[pool.slots, :, pool.columns] = numbers


def _read(slots: slice, columns: int, array: Any) -> Any:
    """The first columns of some slots."""
    return by_part(lambda part: part[slots, :, :columns], array)


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, heads: HeadShape, mask: mx.array
) -> mx.array:
    """Attention [rows, heads, width, dim] of queries of the same shape, over keys and values
    [rows, key heads, columns, dim]."""
    # MLX has no fused attention for the dimensions of latents, and would read them once for each head.
    if heads.cap is not None or heads.value_dims is not None:
        return _attend_unfused(queries, keys, values, heads, mask)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=heads.scale, mask=mask, sinks=heads.sinks
    )


def _attend_unfused(queries: mx.array, keys: Any, values: Any, heads: HeadShape, mask: mx.array) -> mx.array:
    """`_attend` by products and a softmax; heads with the same keys share a product. Keys and values may be packed."""
    rows, count, width, dim = queries.shape
    group = count // heads.key_heads
    grouped = queries.reshape(rows, heads.key_heads, group * width, dim)
    scores = _product(grouped, keys, transpose=True)
    if heads.cap is not None:
        scores = capped(scores * heads.scale, heads.cap) / heads.scale
    apart = _masked(mx.unflatten(scores, 2, (group, width)), mask[:, :, None], heads.scale)
    scores = apart.flatten(2, 3)
    if heads.sinks is not None:
        sinks = mx.repeat(heads.sinks.astype(scores.dtype), width).reshape(
            1, heads.key_heads, group * width, 1
        )
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    shares = mx.softmax(scores, axis=-1, precise=True)
    if heads.sinks is not None:
        shares = shares[..., :-1]
    return _product(shares, values, transpose=False).reshape(rows, count, width, -1)


def _product(inputs: mx.array, columns: Any, *, transpose: bool) -> mx.array:
    """The product with columns [rows, key heads, columns, dim], or with their transpose."""
    if isinstance(columns, PackedColumns):
        size = columns.group_size
        return mx.quantized_matmul(inputs, *columns, transpose=transpose, group_size=size, bits=BITS)
    other: mx.array = columns.swapaxes(-1, -2) if transpose else columns
    return inputs @ other


def capped(numbers: mx.array, cap: float) -> mx.array:
    """Numbers bounded smoothly by +-`cap`."""
    return mx.tanh(numbers / cap) * cap


@partial(mx.compile, shapeless=True)
def _masked(scores: mx.array, mask: mx.array, scale: float) -> mx.array:
    return scores * scale + mask


def _masks(layout: PoolLayout, window: int | None, dtype: mx.Dtype) -> list[mx.array]:
    """Numbers to add to scores: of the short rows, and of each prompt."""
    masks = []
    if layout.short is not None:
        masks.append(_mask(layout.short.last, layout.short.columns, window, dtype)[:, None])
    for piece in layout.prompts:
        last = piece.start + np.minimum(np.arange(padded(piece.count)), piece.count - 1)
        masks.append(_mask(last.astype(np.int32), piece.columns, window, dtype)[None, None])
    return masks


def _mask(last: np.ndarray, columns: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """0 for the columns that a query sees whose last one is `last` [...], else minus infinity: [..., columns]."""
    ends = mx.array(last)[..., None]
    column = mx.arange(columns)
    seen = column <= ends
    if window is not None:
        seen = seen & (column > ends - window)
    return mx.where(seen, mx.array(0, dtype), mx.array(-mx.inf, dtype))
