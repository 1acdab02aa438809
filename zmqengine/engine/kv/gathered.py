"""Rows and columns of caches, gathered in pieces of 8 bytes: a thread of a GPU moves one number, however short."""

from __future__ import annotations

import mlx.core as mx

from zmqengine.engine.host.backend import on_gpu

_PIECE = mx.uint64


def in_pieces(array: mx.array) -> mx.array:
    """View of an array with a wider type on its last axis, where its length allows it."""
    bytes_ = array.shape[-1] * array.itemsize
    return array.view(_PIECE) if array.itemsize < _PIECE.size and bytes_ % _PIECE.size == 0 else array


def rows_of(array: mx.array, rows: mx.array, columns: slice = slice(None)) -> mx.array:
    """Copies of these rows of `array` [rows, heads, columns, width], or of some of their columns."""
    pieces: mx.array = in_pieces(array)[..., columns, :][rows]
    return pieces.view(array.dtype)


def columns_in_order(array: mx.array, order: mx.array) -> mx.array:
    """A copy of `array` [rows, heads, columns, width] with the columns of each row in this order, [rows, columns]."""
    pieces = in_pieces(array)
    if on_gpu():
        return mx.take_along_axis(pieces, order[:, None, :, None], axis=2).view(array.dtype)
    # A CPU copies whole columns twice as fast as number by number.
    rows, heads, columns, width = pieces.shape
    starts = columns * mx.arange(rows * heads, dtype=mx.uint32).reshape(rows, heads, 1)
    copied = mx.take(pieces.reshape(-1, width), starts + order[:, None], axis=0)
    return copied.view(array.dtype)
