"""KV caches of a batch, with one owner: only `KVBatch` changes them outside the model's forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv import generations, rotating
from zmqengine.engine.kv.grouped_copies import RowGroup, group_rows
from zmqengine.engine.kv.kernels import PLAIN, KeysValues, KVKernels, Move, take_rows
from zmqengine.engine.kv.layer import RaggedKVCache
from zmqengine.engine.kv.layout import Layout
from zmqengine.engine.kv.row_caches import arrays, byte_count, single_caches, start
from zmqengine.engine.models.mlx_lm import CacheList, KVCache
from zmqengine.engine.row import Caches

# Maximum share of the allocated memory that no row needs, where that is more than `KVKernels.empty_bytes_max`. More is
# freed by a copy.
_UNUSED_SHARE_MAX = 1 / 4
# Rows to spare in new arrays, as a share of the others: they may join before the next copy.
_SPARE_ROWS_SHARE = 1 / 8


class KVBatch:
    """The KV caches of a batch of rows: `caches`, one for each layer, to be given to the model.

    A layer that keeps every token has a `RaggedKVCache`; layers of other kinds have mlx-lm's own caches of a batch. A
    model whose rows cannot be merged has batches of one row, with that row's own caches.
    """

    def __init__(
        self, caches: Caches | None = None, lengths: Sequence[int] = (), kernels: KVKernels = PLAIN
    ) -> None:
        self._take(caches or [], Layout(kernels, lengths), is_merged=False)
        # Counts changes of the rows: a `BatchRow` made before the last one is stale.
        self.generation = 0
        # Copies for the prefix cache that have not been started.
        self._copies: list[mx.array] = []
        # Columns behind the texts of a prefill between its begin and its end, by row.
        self._right_padding: list[int] = []
        # Arrays that copies replaced, the newest since the last step landed. The device has read them when the step
        # after that lands, and MLX, which drops its references in a thread, before the next one does.
        self._replaced: deque[list[KeysValues]] = deque([[], [], []])
        self.has_replaced = False
        """Whether there are such arrays: `landed` has to be called."""

    @classmethod
    def merge(cls, rows: Sequence[Caches], lengths: Sequence[int], kernels: KVKernels = PLAIN) -> KVBatch:
        """Copy caches of single rows, which hold `lengths` tokens, into a batch; the originals are unchanged."""
        layout = Layout(kernels, lengths)

        def merged(layer: Sequence[Any], number: int) -> RaggedKVCache:
            keys, values = (_merged(layer, name, layout) for name in ("keys", "values"))
            return RaggedKVCache(layout, keys, values, number)

        return cls._of(rows, layout, merged)

    @classmethod
    def adopt(cls, caches: Caches, length: int, kernels: KVKernels = PLAIN) -> KVBatch:
        """Make a batch of one row out of its own caches, without a copy."""
        layout = Layout(kernels, [length])
        return cls._of(
            [caches],
            layout,
            lambda layer, number: RaggedKVCache(layout, layer[0].keys, layer[0].values, number),
        )

    @classmethod
    def _of(
        cls, rows: Sequence[Caches], layout: Layout, merged: Callable[[Sequence[Any], int], RaggedKVCache]
    ) -> KVBatch:
        count = 0

        def merge_layer(layer: Sequence[Any]) -> Any:
            nonlocal count
            if isinstance(layer[0], CacheList):
                children = zip(*(cache.caches for cache in layer), strict=True)
                return CacheList(*map(merge_layer, children))  # type: ignore[no-untyped-call]
            if not all(isinstance(cache, KVCache) for cache in layer):
                return layer[0].merge(list(layer))
            count += 1
            return merged(layer, count - 1)

        batch = cls()
        batch._take([merge_layer(layer) for layer in zip(*rows, strict=True)], layout, is_merged=True)
        return batch

    def _take(self, caches: Caches, layout: Layout, *, is_merged: bool) -> None:
        self.caches = caches
        self._is_merged = is_merged
        self._layout = layout
        self._kernels = layout.kernels
        singles = list(single_caches(caches))
        self._ragged = [cache for cache in singles if type(cache) is RaggedKVCache]
        self._others = [cache for cache in singles if type(cache) is not RaggedKVCache]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row, those of a verify block in flight included."""
        return self._layout.lengths

    @property
    def layout(self) -> Layout:
        """Columns of the rows."""
        return self._layout

    @property
    def byte_count(self) -> int:
        """Bytes of the rows' caches, without `empty_bytes`."""
        allocated = self._moved_bytes
        return allocated - self.empty_bytes if allocated else byte_count(self.caches)

    @property
    def empty_bytes(self) -> int:
        """Bytes of allocated rows and columns that a copy would free, where rows move."""
        allocated = self._moved_bytes
        return int(allocated * self._unused_share(self.lengths)) if allocated else 0

    @property
    def _moved_bytes(self) -> int:
        """Bytes of arrays in which rows have moved; 0 for others."""
        return self._allocated_bytes if self._ragged and self._ragged[0].has_empty_rows else 0

    @property
    def _allocated_bytes(self) -> int:
        return sum(array.nbytes for array in self._ragged[0].all_rows()) * len(self._ragged)

    @property
    def can_roll_back(self) -> bool:
        """Whether `roll_back` is supported: every layer attends to all tokens of a row and caches all of them."""
        return not self._others

    def join(self, other: KVBatch) -> None:
        """Add the rows of `other`, which must not be used any more, after those of this batch."""
        self.start_copies()
        other.start_copies()
        if not self.lengths:
            self._take(other.caches, other._layout, is_merged=other._is_merged)
        elif self._moves_rows and other._room:
            if not self._has_room_for(other):
                self._repack(range(len(self)), len(other), other._layout.columns)
            self._join_in_place(other)
        else:
            self._close_gaps()
            self._join_by_copy(other)
        self._rows_changed()

    def keep_rows(self, indices: Sequence[int]) -> list[int]:
        """Keep only the rows at `indices`, and return `indices` in their new order, since rows may move into freed
        slots.

        Starts the copies that were cut out of the batch first.
        """
        self.start_copies()
        order = list(indices)
        if not order:
            if self._moves_rows:
                self._replace_arrays()
            self._take([], Layout(self._kernels, []), is_merged=True)
        else:
            if self._moves_rows:
                order = fewest_moves(order)
                if not self._keep_in_place(order):
                    self._repack(order)
            else:
                self._keep_by_copy(order)
        self._rows_changed()
        return order

    def begin_step(self, inputs: mx.array, *, idle: bool = False) -> Caches:
        """Make room for a step that reads `inputs` [rows, width], and return the caches for the model.

        While the device is `idle`, it starts on the first layers before the host has built the last ones.
        """
        self._begin(inputs.shape[1], idle=idle)
        return self.caches

    def roll_back(self, counts: Sequence[int]) -> None:
        """Drop the last `counts[i]` tokens of row i. Nothing is copied."""
        assert self.can_roll_back
        self._layout.roll_back(counts)

    def begin_prefill(self, texts: Sequence[Sequence[int]]) -> mx.array:
        """Make room for a text of each row, and return them for the model, [rows, longest], shorter ones padded.

        `end_prefill` must follow the model's call.
        """
        lengths = [len(text) for text in texts]
        padding = [max(lengths) - length for length in lengths]
        padded = [[*text, *[0] * extra] for text, extra in zip(texts, padding, strict=True)]
        if any(padding):
            for cache in self._others:
                cache.prepare(lengths=lengths, right_padding=padding)
        self._begin(len(padded[0]), idle=False)
        self._right_padding = padding
        return mx.array(padded, dtype=mx.uint32)

    def end_prefill(self) -> None:
        """Drop the padding of the texts after the model's call."""
        padding, self._right_padding = self._right_padding, []
        if any(padding):
            self._drop_right(padding)
            for cache in self._others:
                cache.finalize()
        for cache in filter(rotating.is_sliding, self._others):
            rotating.trim_to_window(cache)

    def extract(self, index: int, length: int | None = None) -> Caches:
        """Copy the caches of one row, and start the copy.

        Only its first `length` tokens where the batch can roll back, else all.
        """
        columns = self._layout.columns_of(index)[:length]
        span = as_slice(columns)

        def single(cache: Any) -> Any:
            if isinstance(cache, CacheList):
                return CacheList(*map(single, cache.caches))  # type: ignore[no-untyped-call]
            if type(cache) is not RaggedKVCache:
                return cache.extract(index)
            alone = KVCache()  # type: ignore[no-untyped-call]
            if cache.keys is not None:
                alone.keys, alone.values = (
                    mx.contiguous(array[index : index + 1, :, span]) for array in (cache.keys, cache.values)
                )
                alone.offset = len(columns)
            return alone

        found = [single(cache) for cache in self.caches]
        start(arrays(found))
        return found

    def row(self, index: int) -> BatchRow:
        """The row at `index`, as a source for the prefix cache."""
        return BatchRow(self, index)

    def leaving(self, indices: Sequence[int]) -> dict[int, BatchRow | Caches]:
        """Rows at ascending `indices` as sources for the prefix cache; short ones are copied together."""
        if not self._is_merged:
            return dict.fromkeys(indices, self.caches)
        parts = group_rows(indices, self._layout)
        return {index: BatchRow(self, index, parts[index]) for index in indices}

    def cut(self, copies: Sequence[mx.array]) -> None:
        """Note copies that are built and not started: they are started before a row leaves or another joins."""
        self._copies += copies

    def start_copies(self) -> None:
        """Start the copies that were cut out of the batch."""
        if self._copies:
            start(self._copies)
            self._copies = []
            if self._layout.generations is not None:
                self._layout.generations.started(generations.COPY)

    def launch(self, *values: Any) -> None:
        """Start the computation of `results` of the current step, before any other use of the batch."""
        mx.async_eval(*values)  # type: ignore[no-untyped-call]
        if self._layout.generations is not None:
            self._layout.generations.started(generations.STEP)

    def landed(self) -> None:
        """Note that a step has landed."""
        self._kernels.free(self._replaced.popleft())
        self._replaced.append([])
        self.has_replaced = any(self._replaced)

    def free_replaced(self) -> None:
        """Free the arrays that were replaced, once no step is in flight."""
        for layers in self._replaced:
            self._kernels.free(layers)

    def _replace_arrays(self) -> None:
        """Keep the arrays of all layers, which get other ones, until the device has read them."""
        self._replaced[-1] += [layer.all_rows() for layer in self._ragged]
        self.has_replaced = True

    @property
    def _room(self) -> int:
        """Columns that are allocated; 0 before the first write, or without a layer that keeps every token."""
        return 0 if not self._ragged or self._ragged[0].keys is None else self._ragged[0].keys.shape[2]

    @property
    def _moves_rows(self) -> bool:
        """Whether rows may be moved in place: where every layer is written in place."""
        return (
            bool(self._ragged)
            and not self._others
            and all(layer.is_in_place and self._kernels.can_move_rows(layer.keys) for layer in self._ragged)
        )

    def _rows_changed(self) -> None:
        self.generation += 1

    def _begin(self, width: int, *, idle: bool) -> None:
        """Begin a step; the batch is copied first where that closes gaps, or makes room for rows that move."""
        layout = self._layout
        room = self._room if self.can_roll_back else 0
        is_full = layout.columns + width > room
        if room > 0 and (layout.must_close(width, room) or (is_full and self._moves_rows)):
            if self._moves_rows:
                self._repack(range(len(self)), width=width)
            else:
                self._justify()
        layout.begin_step(width, idle=idle)

    def _has_room_for(self, other: KVBatch) -> bool:
        """Whether the rows of `other` fit behind those of this batch."""
        rows = self._ragged[0].all_rows()[0].shape[0]
        return len(self) + len(other) <= rows and other._layout.columns <= self._layout.columns

    def _join_in_place(self, other: KVBatch) -> None:
        """Add rows in empty slots."""
        before = self._layout.columns - other._layout.columns
        count = len(self)
        layers = [layer.all_rows() for layer in self._ragged]
        moves = [Move(row, count + row, 0, before, other._layout.columns) for row in range(len(other))]
        self._move(layers, [(layer.keys, layer.values) for layer in other._ragged], moves)
        self._layout.join(other._layout)
        for layer, whole in zip(self._ragged, layers, strict=True):
            layer.show_rows(len(self), whole)

    def _move(
        self, layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
    ) -> None:
        if self._layout.generations is not None:
            for move in moves:
                self._layout.generations.wrote([move.row], move.start, move.start + move.columns)
        self._kernels.move_rows(layers, sources, moves)

    def _join_by_copy(self, other: KVBatch) -> None:
        columns = max(self._layout.columns, other._layout.columns)
        size = max(self._layout.with_room(columns), self._room, other._room)
        left = [columns - batch._layout.columns for batch in (self, other)]
        if self._room or other._room:
            for ours, theirs in zip(self._ragged, other._ragged, strict=True):
                joined = []
                for name in ("keys", "values"):
                    known = [getattr(ours, name), getattr(theirs, name)]
                    parts = [
                        _padded_to(_or_zeros(array, rows, known), before, size)
                        for array, rows, before in zip(known, (len(self), len(other)), left, strict=True)
                    ]
                    joined.append(mx.concatenate(parts))
                ours.joined(*joined)
        self._layout.replaced()
        for ours, theirs in zip(self._others, other._others, strict=True):
            ours.extend(theirs)
        self._layout.join(other._layout)

    def _keep_in_place(self, indices: Sequence[int]) -> bool:
        """Keep the rows at `indices`, in the order of `fewest_moves`.

        Returns False, without a change, if rows do not move, or if a copy would free enough memory.
        """
        count = len(indices)
        if any(index != at and index < count for at, index in enumerate(indices)):
            return False
        layout = self._layout
        unused = self._unused_share([layout.lengths[index] for index in indices])
        if unused > max(_UNUSED_SHARE_MAX, self._kernels.empty_bytes_max / self._allocated_bytes):
            return False
        layers = [layer.all_rows() for layer in self._ragged]
        moves = [Move(index, at, 0, 0, layout.columns) for at, index in enumerate(indices) if index != at]
        if moves:
            self._move(layers, layers, moves)
        for layer, whole in zip(self._ragged, layers, strict=True):
            layer.show_rows(count, whole)
        layout.keep_rows(indices)
        return True

    def _unused_share(self, lengths: Sequence[int]) -> float:
        """Share of the allocated memory that a copy of rows of these lengths would free."""
        rows, _, columns, _ = self._ragged[0].all_rows()[0].shape
        needed: float = len(lengths) * self._layout.with_room(max(lengths)) / (rows * columns)
        return max(0.0, 1 - needed)

    def _repack(
        self, indices: Sequence[int], more_rows: int = 0, columns: int = 0, *, width: int = 1
    ) -> None:
        """Copy the rows at `indices` into new arrays, right-justified and without gaps, in at least `columns`.

        There is room for `more_rows`, and for a step of `width`.
        """
        layout, count = self._layout, len(indices)
        lengths = [layout.lengths[index] for index in indices]
        columns = max(columns, *lengths)
        order = self._right_justified(indices, columns, layout.with_room(columns + width - 1))
        rows_before = np.array(indices, np.int32)[:, None] * self._room
        places = mx.array(np.where(order < 0, order, order + rows_before))
        rows = count + more_rows
        rows += self._spare_rows(rows, order.shape[1])
        self._replace_arrays()
        for layer in self._ragged:
            layer.repack(self._kernels, places, rows)
        layout.replaced()
        layout.set_rows(lengths, columns)

    def _spare_rows(self, rows: int, columns: int) -> int:
        """Empty rows to allocate beside `rows` of `columns` columns: a share of them, or one of at most
        `KVKernels.empty_bytes_max`."""
        if share := int(rows * _SPARE_ROWS_SHARE):
            return share
        keys = self._ragged[0].all_rows()[0]
        row_bytes = self._allocated_bytes // keys.shape[0] * columns // keys.shape[2]
        return int(row_bytes <= self._kernels.empty_bytes_max)

    def _keep_by_copy(self, indices: Sequence[int]) -> None:
        layout = self._layout
        lengths = [layout.lengths[index] for index in indices]
        columns = slice(None)
        if layout.gaps is None:
            begin = layout.columns - max(lengths)
            columns = slice(begin, begin + layout.with_room(max(lengths)))
        layout.replaced()
        rows = self._kernels.small(indices)
        for layer in self._ragged:
            if layer.keys is not None:
                layer.keys, layer.values = (
                    take_rows(layer.keys, rows, columns),
                    take_rows(layer.values, rows, columns),
                )
        for cache in self._others:
            if rotating.is_sliding(cache):
                rotating.keep_rows(cache, indices, lengths)
            else:
                cache.filter(list(indices))
        if layout.gaps is None:
            layout.set_rows(lengths)
        else:
            # Closing gaps would take longer than the step.
            layout.keep_rows(indices)

    def _close_gaps(self) -> None:
        if self._layout.gaps is not None:
            self._justify()

    def _justify(self) -> None:
        """Copy the batch right-justified and without gaps; the longest row begins in the first column."""
        layout, lengths = self._layout, self.lengths
        longest = max(lengths)
        order = self._right_justified(range(len(lengths)), longest, layout.with_room(longest))
        # Padding takes any column.
        self._take_columns(mx.array(np.maximum(order, 0).astype(np.uint32)))
        layout.set_rows(lengths)

    def _right_justified(self, indices: Sequence[int], columns: int, room: int) -> np.ndarray:
        """The column of each token of the rows at `indices`, [rows, room] of int32, with the last in `columns` - 1; -1
        elsewhere."""
        order = np.full((len(indices), room), -1, np.int32)
        for at, index in enumerate(indices):
            own = self._layout.columns_of(index)
            order[at, columns - len(own) : columns] = own
        return order

    def _drop_right(self, padding: Sequence[int]) -> None:
        """Drop the last `padding[i]` unused columns of row i by moving its tokens to the right."""
        layout = self._layout
        common = min(padding)
        columns = layout.columns - common
        moved = [count - common for count in padding]
        lengths = [length - count for length, count in zip(layout.lengths, padding, strict=True)]
        if any(moved) and self._room:
            order = np.arange(self._room, dtype=np.uint32)[None].repeat(len(moved), axis=0)
            order[:, :columns] = (np.arange(columns)[None] - np.array(moved)[:, None]) % columns
            self._take_columns(mx.array(order))
        layout.set_rows(
            lengths, columns, [before + count for before, count in zip(layout.padding, moved, strict=True)]
        )

    def _take_columns(self, order: mx.array) -> None:
        self._layout.replaced()
        for layer in self._ragged:
            if layer.keys is not None:
                layer.keys, layer.values = (
                    self._kernels.take_columns(layer.keys, order),
                    self._kernels.take_columns(layer.values, order),
                )


class BatchRow:
    """A row of a batch as a source of copies, until rows join or leave.

    `part`: rows that are copied together with it, if there are any.
    """

    def __init__(self, batch: KVBatch, index: int, part: RowGroup | None = None) -> None:
        self._batch = batch
        self._generation = batch.generation
        self.index = index
        self.part = part

    @property
    def batch(self) -> KVBatch:
        """The batch. Raises AssertionError if its rows have changed, since this row may have moved."""
        assert self._generation == self._batch.generation, "a row of a batch is read after rows have moved"
        return self._batch

    def cut(self, names: Sequence[tuple[int, str]], start: int, end: int) -> mx.array:
        """Tokens `start` to `end` in arrays of one shape, (arrays, 1, heads, tokens, width), to be copied.

        `names`: (index of the cache among all single caches, attribute) of each array.
        """
        layout, index = self.batch.layout, self.index
        singles = list(single_caches(self.batch.caches))
        columns = layout.columns_of(index)[start:end]
        if layout.generations is not None:
            layout.generations.built(generations.COPY, index, columns)
        if self.part is not None:
            return self.part.cut(singles, names, index, start, end)
        span = as_slice(columns)
        spare = 0
        if isinstance(span, slice) and columns.size:
            spare = min(span.start, layout.kernels.copied_columns(columns.size) - columns.size)
            span = slice(span.start - spare, span.stop)
        return mx.concatenate(
            [getattr(singles[cache], name)[index : index + 1, :, span] for cache, name in names]
        )[:, None, :, spare:]

    def extract(self, indices: Sequence[int]) -> dict[int, Any]:
        """Caches of this row alone; of all single caches those at `indices`."""
        singles = list(single_caches(self.batch.caches))
        return {index: singles[index].extract(self.index) for index in indices}


def can_merge(caches: Caches) -> bool:
    """Whether rows with these caches can be merged into a batch."""
    return all(hasattr(cache, "merge") for cache in single_caches(caches))


def as_slice(columns: np.ndarray) -> Any:
    """An index of ascending `columns`: a slice where they are consecutive."""
    if not len(columns):
        return slice(0)
    begin, end = int(columns[0]), int(columns[-1]) + 1
    return slice(begin, end) if end - begin == len(columns) else mx.array(columns)


def fewest_moves(indices: Sequence[int]) -> list[int]:
    """`indices` in the order in which the fewest rows of a batch move."""
    count = len(indices)
    staying = {index for index in indices if index < count}
    last = [index for index in indices if index >= count]
    return [index if index in staying else last.pop() for index in range(count)]


def _merged(layer: Sequence[Any], name: str, layout: Layout) -> mx.array | None:
    """Keys or values of a layer of single rows, copied into one array, right-justified; None if all are empty."""
    known = [getattr(cache, name) for cache in layer]
    if all(array is None for array in known):
        return None
    size = layout.with_room(layout.columns)
    parts = [
        _padded_to(_or_zeros(array, 1, known)[..., :length, :], layout.columns - length, size)
        for array, length in zip(known, layout.lengths, strict=True)
    ]
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def _or_zeros(array: mx.array | None, rows: int, others: Sequence[mx.array | None]) -> mx.array:
    """`array`; for None, an array without columns in the shape of `others`."""
    if array is not None:
        return array
    like = next(other for other in others if other is not None)
    return mx.zeros((rows, like.shape[1], 0, like.shape[3]), like.dtype)


def _padded_to(array: mx.array, left: int, size: int) -> mx.array:
    """`array` after `left` empty columns, in `size` columns in all."""
    right = size - left - array.shape[2]
    if right < 0:
        array = array[..., : size - left, :]
        right = 0
    return mx.pad(array, [(0, 0), (0, 0), (left, right), (0, 0)]) if left or right else array
