"""Attention over slots on CUDA: two kernels a layer for all pieces of a step, whatever their number.

The first rotates heads and writes keys and values into the slots, in place; the second attends. They take the arrays of
all pools, and a table made once a step: the place of each token, and the queries and columns of each thread block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda import attention
from zmqengine.engine.cuda.between_products import rotate, rotates
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.slots import POOLS_MAX, SlotPool
from zmqengine.engine.models.attention import MlxAttention, PlacedPiece
from zmqengine.engine.models.few_sizes import few_sizes
from zmqengine.engine.models.layers import HeadShape

# Numbers of the place of a token.
_PLACE = 4


class CudaLayout(NamedTuple):
    """A step: what the traces of all layers take, and the arrays of each.

    `kind`: constants of a trace other than array shapes, the number of tiles and of parts of a row's columns. `shared`:
    arrays that every layer takes before its own, which are in `layers`. `pieces` and `tokens`: the step's.
    """

    kind: tuple[int, int]
    shared: list[mx.array]
    layers: Sequence[list[mx.array]]
    pieces: Sequence[PlacedPiece]
    tokens: int


class CudaAttention:
    """`SlotAttention` by these kernels."""

    is_replayed = True

    def __init__(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> None:
        self._heads = heads
        self._caches = caches
        self._group = heads[0].heads // heads[0].key_heads
        self._by_mlx = MlxAttention(heads, caches)

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> CudaLayout:
        """See `SlotAttention`."""
        pools = list(dict.fromkeys(piece.slot.pool for piece in pieces))
        index = {pool: number for number, pool in enumerate(pools)}
        pool_numbers = np.array([index[piece.slot.pool] for piece in pieces], np.int32)
        table = np.array(
            [(piece.slot.index, piece.start, piece.count, piece.shift) for piece in pieces], np.int32
        )
        places, tiles = _places(pool_numbers, table, tokens), _tiles(pool_numbers, table, tokens, self._group)
        # A trace is for one size: tokens without a place, and tiles without tokens.
        count = few_sizes(len(tiles))
        tiles = np.concatenate([tiles, np.zeros((count - len(tiles), attention.TILE), np.int32)])
        blocks = count + (attention.WARPS - 1) * int(tiles[:, -1].sum())
        columns = int((table[:, 1] + table[:, 2]).max())
        parts = attention.parts_of(blocks * self._heads[0].key_heads, columns)
        numbers = resident(mx.array(np.concatenate([places.ravel(), tiles.ravel()])))
        shared = [numbers[: tokens * _PLACE], numbers[tokens * _PLACE :]]
        corners = [_corners(pool) for pool in pools]
        corners += corners[:1] * (POOLS_MAX - len(pools))
        layers = [[array for pool in corners for array in pool[cache]] for cache in self._caches]
        return CudaLayout((count, parts), shared, layers, pieces, tokens)

    def attend(self, layout: CudaLayout, layer: int, qkv: Sequence[mx.array]) -> mx.array:
        """See `SlotAttention`. Takes the joined product; rotated heads of tokens with three positions are MLX's."""
        heads = self._heads[layer]
        if len(qkv) == 1:
            return self.attend_replayed(layout.kind, heads, *qkv, *layout.shared, *layout.layers[layer])
        attended = self._by_mlx.attend(self._by_mlx.begin(layout.pieces, layout.tokens), layer, qkv)
        for piece in layout.pieces:
            # MLX has written into new arrays.
            piece.slot.pool.replaced()
        return attended

    def attend_replayed(
        self, kind: tuple[int, int], heads: HeadShape, product: mx.array, *arrays: mx.array
    ) -> mx.array:
        """Attention [tokens, heads * dim] of a layer's joined product [tokens, outputs]; depends on nothing else. Zeros
        for padding."""
        _, parts = kind
        places, tiles, *keys_values = arrays
        return attention.attend(heads, parts, rotate(heads, product, places, keys_values), tiles, keys_values)

    def examples(self, tokens: int) -> list[CudaLayout]:
        """A step of as many rows in decode of every kind, to trace it before there is one."""
        tiles = few_sizes(tokens)
        shared = [mx.zeros((tokens * _PLACE,), mx.int32), mx.zeros((tiles * attention.TILE,), mx.int32)]
        layers = [
            [mx.zeros((1, heads.key_heads, 1, heads.dim), heads.dtype)] * (2 * POOLS_MAX)
            for heads in self._heads
        ]
        every_parts = attention.every_parts(tiles * self._heads[0].key_heads)
        return [CudaLayout((tiles, parts), shared, layers, (), tokens) for parts in every_parts]


def supports(layers: Sequence[HeadShape]) -> bool:
    """Whether the kernels support all of these layers."""
    group = layers[0].heads // layers[0].key_heads
    return all(
        heads.window is None
        and heads.heads == group * heads.key_heads
        and rotates(heads)
        and attention.supports(heads.dtype, heads.dim)
        for heads in layers
    )


def _corners(pool: SlotPool) -> list[list[mx.array]]:
    """The first column of the first slot of keys and values of each layer, [1, heads, 1, dim], in their memory.

    Kernels find the other slots and columns by their strides: a trace is for one shape, and pools have many.
    """
    if pool.views is None:
        pool.views = [
            [keys[:1, :, :1], values[:1, :, :1]] for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        mx.async_eval(pool.views)  # type: ignore[no-untyped-call]
    corners: list[list[mx.array]] = pool.views
    return corners


def _places(pool_numbers: np.ndarray, table: np.ndarray, tokens: int) -> np.ndarray:
    """SlotPool, slot, column and position of each token."""
    places = np.full((tokens, _PLACE), -1, np.int32)
    counts = table[:, 2]
    begins = np.cumsum(counts) - counts
    total = int(counts.sum())
    ahead = np.arange(total) - np.repeat(begins, counts)
    places[:total, 0] = np.repeat(pool_numbers, counts)
    places[:total, 1] = np.repeat(table[:, 0], counts)
    places[:total, 2] = np.repeat(table[:, 1], counts) + ahead
    places[:total, 3] = places[:total, 2] + np.repeat(table[:, 3], counts)
    return places


def _tiles(pool_numbers: np.ndarray, table: np.ndarray, tokens: int, group: int) -> np.ndarray:
    """The table of attention.cu. Tiles of prompts come first, since they take longest."""
    tiles: list[tuple[int, ...]] = []
    begin = 0
    for pool, (slot, start, count, _) in zip(pool_numbers.tolist(), table.tolist(), strict=True):
        step = attention.block_queries(group * count)
        apart = int(step > attention.block_queries(1))
        for query in range(0, group * count, step):
            tiles.append((pool, slot, start + count, count, query, begin, apart))
        begin += count
    if tokens > begin:
        # Padding is a row without columns.
        count = tokens - begin
        step = attention.block_queries(group * count)
        apart = int(step > attention.block_queries(1))
        tiles += [(0, 0, 0, count, query, begin, apart) for query in range(0, group * count, step)]
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, np.int32)
