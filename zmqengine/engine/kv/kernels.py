"""Operations on the arrays of a batch that depend on the device, behind one object chosen when the engine opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from zmqengine.engine.models.few_sizes import few_sizes

_WORD = mx.uint64


class Move(NamedTuple):
    """A copy of `columns` columns of row `from_row`, from column `from_start` on, into `row` from `start` on."""

    from_row: int
    row: int
    from_start: int
    start: int
    columns: int


KeysValues = tuple[mx.array, mx.array]


class KVKernels(Protocol):
    """Operations of `KVBatch` on one device. Arrays are [rows, heads, columns, width]."""

    growth: int
    """Columns that a batch grows by."""
    prompts_apart: int
    """Maximum prompts of a chunk that are segments of their own. More of them are merged for a padded call, unless they
    have cached tokens. 0 where a merge costs less than a call; where rows are written in place, its copies are more
    kernels than calls."""
    empty_bytes_max: int
    """Bytes of empty rows and columns that a batch may keep, whatever its size: a few rows would be copied whenever one
    joins or leaves."""

    def small(self, values: Sequence[int] | mx.array) -> mx.array:
        """`values` as int32, in memory that the kernels of every layer read fast."""
        ...

    def take_columns(self, array: mx.array, order: mx.array) -> mx.array:
        """A copy of `array` with the columns of each row in this order, [rows, columns]."""
        ...

    def copied_columns(self, columns: int) -> int:
        """Columns to copy for `columns` of a row: one of few numbers, where freed buffers are reused by their size."""
        ...

    def can_move_rows(self, keys: mx.array) -> bool:
        """Whether `move_rows` works for arrays like `keys`."""
        ...

    def move_rows(
        self, layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
    ) -> None:
        """Start to write columns of `sources` into rows of `layers` in place, unknown to MLX.

        `sources` may be `layers` if no move reads a row that another move writes.
        """
        ...

    def repack(self, layer: KeysValues, order: mx.array, rows: int) -> KeysValues:
        """A copy of `layer` in new arrays of `rows` rows, for devices where rows move.

        Column c of row r is the one at `order[r, c]` [fewer rows, columns] = row * columns of `layer` + column. Where
        that is negative, and in the rows behind, it is not initialised.
        """
        ...

    def free(self, layers: list[KeysValues]) -> None:
        """Drop arrays that `repack` replaced, and that the device has read."""
        ...


class PlainKernels:
    """`KVKernels` by documented MLX calls, for a CPU or for a GPU without kernels of ours. No rows are moved."""

    prompts_apart = 0
    empty_bytes_max = 0

    def __init__(self, *, gpu: bool = False) -> None:
        # Rows that join or leave copy the batch, spare columns included, which takes a CPU as long as a step. A GPU's
        # attention is fastest with multiples of 256, mlx-lm's own growth.
        self.growth = 256 if gpu else 64
        self._gpu = gpu

    def small(self, values: Sequence[int] | mx.array) -> mx.array:
        """See `KVKernels`."""
        return values if isinstance(values, mx.array) else mx.array(list(values), dtype=mx.int32)

    def take_columns(self, array: mx.array, order: mx.array) -> mx.array:
        """See `KVKernels`."""
        words = in_words(array)
        if self._gpu:
            return mx.take_along_axis(words, order[:, None, :, None], axis=2).view(array.dtype)
        # A CPU copies whole columns twice as fast as number by number.
        rows, heads, columns, width = words.shape
        starts = columns * mx.arange(rows * heads, dtype=mx.uint32).reshape(rows, heads, 1)
        copied = mx.take(words.reshape(-1, width), starts + order[:, None], axis=0)
        return copied.view(array.dtype)

    def copied_columns(self, columns: int) -> int:
        """See `KVKernels`. MLX keeps freed buffers of a GPU only."""
        return few_sizes(columns) if self._gpu else columns

    def can_move_rows(self, keys: mx.array) -> bool:
        """False: MLX has no call that writes in place."""
        return False

    def move_rows(
        self, layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
    ) -> None:
        """Unsupported: raises NotImplementedError."""
        raise NotImplementedError

    def repack(self, layer: KeysValues, order: mx.array, rows: int) -> KeysValues:
        """Unsupported: raises NotImplementedError."""
        raise NotImplementedError

    def free(self, layers: list[KeysValues]) -> None:
        """See `KVKernels`."""
        layers.clear()


PLAIN = PlainKernels()


def in_words(array: mx.array) -> mx.array:
    """View of an array as 8-byte words on its last axis, where its length allows it.

    A thread of a GPU copies one element at a time, whatever its size.
    """
    bytes_ = array.shape[-1] * array.itemsize
    return array.view(_WORD) if array.itemsize < _WORD.size and bytes_ % _WORD.size == 0 else array


def take_rows(array: mx.array, rows: mx.array, columns: slice = slice(None)) -> mx.array:
    """Copy these rows of `array` [rows, heads, columns, width], or some of their columns."""
    words: Any = in_words(array)[..., columns, :][rows]
    copied: mx.array = words.view(array.dtype)
    return copied
