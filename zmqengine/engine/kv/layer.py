"""The KV cache of one layer of a batch."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.kernels import KeysValues, KVKernels
from zmqengine.engine.kv.layout import Layout, Spans


class Arrays(IntEnum):
    """Ownership of a layer's arrays. Only `OWNED` ones may be written in place, see the theory in `kv`."""

    SHARED = 0
    """The memory may be shared with a row's own cache or a block of the prefix cache."""

    OWNED = 1
    """The result of a write of this layer by MLX, or of a copy into new memory: not shared."""

    IN_PLACE = 2
    """Owned, and written in place since; may be the first rows of larger arrays."""


class RaggedKVCache:
    """Keys and values of one layer, [rows, heads, columns, width], in the `layout` that all layers of a batch share.

    To mlx-lm's models it is a cache like `BatchKVCache`. Rows roll back by different counts of tokens without a copy.
    A step in which no row has padding or gaps needs no mask.
    """

    def __init__(self, layout: Layout, keys: mx.array | None, values: mx.array | None, number: int) -> None:
        self.layout = layout
        self._whole: KeysValues | None = None
        self._corners: KeysValues | None = None
        self.values: Any = values
        self.keys = keys
        self._number = number
        self._written_step = layout.step

    @property
    def keys(self) -> Any:
        """Keys, with room for more columns; None before the first write."""
        return self._keys

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self._keys: Any = keys
        self._replaced(Arrays.SHARED)

    @property
    def offset(self) -> mx.array:
        """Positions of the next token of each row, [rows]: after the step once this layer was written."""
        layout = self.layout
        return layout.offset if self._written_step == layout.step else layout.offset_before

    @property
    def state(self) -> tuple[Any, ...]:
        return self._keys, self.values, self.layout.offset, self.layout.left_padding

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in the batch."""
        return 0 if self._keys is None else self._keys.nbytes + self.values.nbytes

    @property
    def has_empty_rows(self) -> bool:
        """Whether the arrays may have more rows than the batch."""
        return self._whole is not None

    @property
    def is_in_place(self) -> bool:
        """Whether the layer's last write was in place."""
        return self._arrays is Arrays.IN_PLACE

    @property
    def corners(self) -> KeysValues:
        """The first column of the first row of `keys` and of `values`, (1, heads, 1, width), in their memory.

        Kernels that are given these find the other rows and columns by their strides. For arrays that `can_write_here`:
        MLX copies arrays whose memory has another reference, instead of writing into them.
        """
        if self._corners is None:
            assert self._arrays is not Arrays.SHARED, "MLX would copy arrays with another reference"
            self._corners = self._keys[:1, :, :1], self.values[:1, :, :1]
        return self._corners

    def size(self) -> int:
        """Columns in use in this layer."""
        layout = self.layout
        return layout.columns if self._written_step == layout.step else layout.start

    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._keys is None

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> mx.array | None:  # noqa: N803
        """The mask of a step of `N` columns, [rows, 1, N, columns]; None if every row sees every column."""
        layout = self.layout
        assert layout.columns - layout.start == N, "a step is begun by KVBatch.begin_step"
        if N == 1 and layout.is_level and self._keys is not None and options.get("window_size") is None:
            return None
        return layout.mask(**options)

    def spans(self, count: int) -> Spans | None:
        """The columns that each row sees in a step of `count`; None before the first write."""
        assert self.layout.width == count, "a step is begun by KVBatch.begin_step"
        return None if self._keys is None else self.layout.spans()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Write the columns of a step [rows, heads, columns, width]; returns all columns so far."""
        self.write(keys, values)
        columns = self.layout.columns
        return self._keys[..., :columns, :], self.values[..., :columns, :]

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write the columns of a step."""
        layout = self.layout
        start, stop = layout.start, layout.columns
        assert stop - start == keys.shape[2], "a step is begun by KVBatch.begin_step"
        if self._keys is None or stop > self._keys.shape[2]:
            self._grow(keys, values)
        self._keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        # If the step's columns are all columns, MLX's result is the new keys themselves, a part of a larger array.
        self._replaced(Arrays.OWNED if keys.shape[2] < self._keys.shape[2] else Arrays.SHARED)
        self._written_step = layout.step
        if not self._number:
            layout.replaced()
        if layout.is_early and layout.is_early_layer(self._number):
            mx.async_eval(self._keys)  # type: ignore[no-untyped-call]

    def can_write_here(self, count: int, dtype: mx.Dtype) -> bool:
        """Whether the `count` columns of the step may be written into `keys` and `values` in place."""
        keys = self._keys
        if keys is None or self._arrays is Arrays.SHARED or keys.dtype != dtype:
            return False
        return self.layout.width == count and self.layout.columns <= keys.shape[2]

    def wrote_in_place(self, count: int, done: mx.array) -> bool:
        """Note that the computation of `done` writes the `count` columns of the step; returns whether the device should
        start on it now."""
        self._arrays = Arrays.IN_PLACE
        self._written_step = self.layout.step
        if not self._number:
            self.layout.wrote_in_place()
        return self.layout.is_early_layer(self._number)

    def all_rows(self) -> KeysValues:
        """Keys and values with all rows that are allocated."""
        return (self._keys, self.values) if self._whole is None else self._whole

    def show_rows(self, count: int, whole: KeysValues) -> None:
        """Make the batch the first `count` rows of `whole`, the arrays of `all_rows`."""
        self._corners = None
        self._whole = keys, values = whole
        self._keys, self.values = keys[:count], values[:count]

    def repack(self, kernels: KVKernels, order: mx.array, rows: int) -> None:
        """Copy the rows of `order` into arrays of `rows` rows; see `KVKernels.repack`."""
        whole = kernels.repack((self._keys, self.values), order, rows)
        self.show_rows(order.shape[0], whole)

    def joined(self, keys: mx.array, values: mx.array) -> None:
        """Take arrays that were concatenated of several that are not empty, so in new memory."""
        self._keys, self.values = keys, values
        self._replaced(Arrays.OWNED)

    def _replaced(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._whole = self._corners = None

    def _grow(self, keys: mx.array, values: mx.array) -> None:
        """Append room for the columns of a step, in whole steps of growth."""
        start, growth = self.layout.start, self.layout.kernels.growth
        columns = -(-keys.shape[2] // growth) * growth
        room = [mx.zeros((*new.shape[:2], columns, new.shape[3]), new.dtype) for new in (keys, values)]
        if self._keys is not None:
            known = self._keys, self.values
            if start % growth:
                known = known[0][..., :start, :], known[1][..., :start, :]
            room = [mx.concatenate([old, new], axis=2) for old, new in zip(known, room, strict=True)]
        self._keys, self.values = room
