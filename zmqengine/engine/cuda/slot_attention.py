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
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import POOLS_MAX, SlotPool
from zmqengine.engine.models.attention import MlxAttention, PlacedPiece
from zmqengine.engine.models.layers import HeadShape

# Numbers of the place of a token.
_PLACE = 4


Kind = tuple[tuple[int, int], ...]


class CudaLayout(NamedTuple):
    """A step: what the traces of all layers take, and the arrays of each.

    `kind`: constants of a trace other than array shapes, by `_Reading`: the number of tiles, and of parts of a row's
    columns. `shared`: arrays that every layer takes before its own, which are in `layers`. `pieces` and `tokens`: the
    step's.
    """

    kind: Kind
    shared: list[mx.array]
    layers: Sequence[list[mx.array]]
    pieces: Sequence[PlacedPiece]
    tokens: int


class _Tiling(NamedTuple):
    """The part of a shape that a step's tiles depend on: `group` heads with the same keys, of `dim` dimensions."""

    group: int
    dim: int


class _Reading(NamedTuple):
    """The part of a shape that thread blocks depend on: layers with the same one take as many parts."""

    tiling: _Tiling
    key_heads: int
    window: int | None


def _reading(heads: HeadShape) -> _Reading:
    return _Reading(_Tiling(heads.heads // heads.key_heads, heads.dim), heads.key_heads, heads.window)


class CudaAttention:
    """`SlotAttention` by these kernels."""

    is_replayed = True
    reads_packed = False

    def __init__(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> None:
        self._heads = heads
        self._caches = caches
        readings = list(map(_reading, heads))
        self._readings = list(dict.fromkeys(readings))
        self._tilings = list(dict.fromkeys(reading.tiling for reading in readings))
        self._tables = [self._tilings.index(reading.tiling) for reading in readings]
        self._by_mlx = MlxAttention(heads, caches)

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> CudaLayout:
        """See `SlotAttention`."""
        pools = list(dict.fromkeys(piece.slot.pool for piece in pieces))
        index = {pool: number for number, pool in enumerate(pools)}
        pool_numbers = np.array([index[piece.slot.pool] for piece in pieces], np.int32)
        table = np.array(
            [(piece.slot.index, piece.start, piece.count, piece.shift) for piece in pieces], np.int32
        )
        tiles = {tiling: _tiles(pool_numbers, table, tokens, tiling) for tiling in self._tilings}
        kind = []
        for reading in self._readings:
            own = tiles[reading.tiling]
            # A block whose warps have queries of their own counts for each.
            warps = len(own) + (attention.WARPS - 1) * int(own[:, -1].sum())
            kind.append((len(own), _parts(reading, warps, table[:, 1] + table[:, 2], table[:, 2])))
        flat = [
            _places(pool_numbers, table, tokens, pieces).ravel(),
            *(each.ravel() for each in tiles.values()),
        ]
        numbers = resident(mx.array(np.concatenate(flat)))
        ends = np.cumsum([len(part) for part in flat]).tolist()
        places, *tables = (numbers[end - len(part) : end] for part, end in zip(flat, ends, strict=True))
        corners = [_corners(pool) for pool in pools]
        corners += corners[:1] * (POOLS_MAX - len(pools))
        layers = [
            [tables[table]] + [array for pool in corners for array in pool[cache]]
            for table, cache in zip(self._tables, self._caches, strict=True)
        ]
        return CudaLayout(tuple(kind), [places], layers, pieces, tokens)

    def attend(self, layout: CudaLayout, layer: int, qkv: Sequence[mx.array]) -> mx.array:
        """See `SlotAttention`. Takes the joined product; rotated heads of tokens with three positions are MLX's."""
        heads = self._heads[layer]
        if qkv[0].ndim == 2:
            return self.attend_replayed(layout.kind, heads, *qkv, *layout.shared, *layout.layers[layer])
        attended = self._by_mlx.attend(self._by_mlx.begin(layout.pieces, layout.tokens), layer, qkv)
        for piece in layout.pieces:
            # MLX has written into new arrays.
            piece.slot.pool.replaced()
        return attended

    def attend_replayed(self, kind: Kind, heads: HeadShape, product: mx.array, *arrays: mx.array) -> mx.array:
        """Attention [tokens, heads * dim] of a layer's joined product [tokens, outputs]; depends on nothing else. Zeros
        for padding."""
        _, parts = kind[self._readings.index(_reading(heads))]
        places, tiles, *keys_values = arrays
        return attention.attend(heads, parts, rotate(heads, product, places, keys_values), tiles, keys_values)

    def examples(self, tokens: int) -> list[CudaLayout]:
        """A step of as many rows in decode of every kind, to trace it before there is one."""
        counts = {tiling: few_sizes(tokens * len(_first_queries(1, tiling))) for tiling in self._tilings}
        one = np.ones(1, np.int32)
        kinds = dict.fromkeys(
            tuple(
                (counts[reading.tiling], _parts(reading, counts[reading.tiling], columns * one, one))
                for reading in self._readings
            )
            for columns in (1, *attention.SPLIT_COLUMNS)
        )
        tables = [mx.zeros((count * attention.TILE,), mx.int32) for count in counts.values()]
        layers = [
            [tables[table], *[mx.zeros((1, heads.key_heads, 1, heads.dim), heads.dtype)] * (2 * POOLS_MAX)]
            for heads, table in zip(self._heads, self._tables, strict=True)
        ]
        places = mx.zeros((tokens * _PLACE,), mx.int32)
        return [CudaLayout(kind, [places], layers, (), tokens) for kind in kinds]


def supports(layers: Sequence[HeadShape]) -> bool:
    """Whether the kernels support all of these layers."""
    return all(
        heads.heads % heads.key_heads == 0
        and heads.value_dims is None
        and rotates(heads)
        and attention.supports(heads.dtype, heads.dim)
        for heads in layers
    )


def _parts(reading: _Reading, tiles: int, ends: np.ndarray, tokens: np.ndarray) -> int:
    """Parts of a row's columns, for rows with so many before `ends`, the last `tokens` of them of the step."""
    if reading.window is not None:
        ends = np.minimum(ends, reading.window - 1 + np.minimum(tokens, attention.BLOCK_QUERIES_MAX))
    blocks = attention.blocks_of(tiles, reading.key_heads, reading.tiling.dim)
    return attention.parts_of(blocks, int(ends.max()))


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


def _places(
    pool_numbers: np.ndarray, table: np.ndarray, tokens: int, pieces: Sequence[PlacedPiece]
) -> np.ndarray:
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
    for piece, begin in zip(pieces, begins.tolist(), strict=True):
        if piece.positions is not None:
            places[begin : begin + piece.count, 3] = piece.positions
    return places


def _tiles(pool_numbers: np.ndarray, table: np.ndarray, tokens: int, tiling: _Tiling) -> np.ndarray:
    """The table of attention.cu. Tiles of prompts come first, since they take longest."""
    tiles: list[tuple[int, ...]] = []
    begin = 0
    rows = [
        (pool, slot, start + count, count)
        for pool, (slot, start, count, _) in zip(pool_numbers.tolist(), table.tolist(), strict=True)
    ]
    if padding := tokens - sum(count for *_, count in rows):
        # Padding is a row without columns.
        rows.append((0, 0, 0, padding))
    for pool, slot, end, count in rows:
        queries = _first_queries(count, tiling)
        apart = int(queries.step == attention.BLOCK_QUERIES_MAX)
        tiles += [(pool, slot, end, count, query, begin, apart) for query in queries]
        begin += count
    tiles.sort(key=lambda tile: -tile[3])
    # A trace is for one size: tiles without tokens fill it up.
    tiles += [(0,) * attention.TILE] * (few_sizes(len(tiles)) - len(tiles))
    return np.array(tiles, np.int32)


def _first_queries(tokens: int, tiling: _Tiling) -> range:
    """The first query of each tile of a row."""
    queries = tiling.group * tokens
    return range(0, queries, attention.block_queries(queries, tiling.dim))
