"""A batch's KV cache whose rows roll back by different counts of tokens, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.kv.gathered import columns_in_order, rows_of
from zmqengine.engine.kv.spans import Spans
from zmqengine.engine.models.mlx_lm import BatchKVCache, create_causal_mask
from zmqengine.engine.row import Caches

# Gaps are read by every step. They are closed when they are more than this, and a part of what rows hold.
_GAP_COLUMNS_MAX = 64
_GAP_SHARE_MAX = 0.25
# An idle device is given so many layers at a time.
_BEGIN_LAYERS = 4


class Gaps:
    """Masked slots: columns that some rows of a batch do not use, `hidden` [rows, columns], the same in all layers.

    A row is its columns after the padding that are not hidden, in order. Keys are rotated by their positions before
    they are written, so a masked slot moves nothing: it has only to be left out of every attention mask.
    """

    def __init__(self, hidden: np.ndarray) -> None:
        self.hidden = hidden
        # Device copy of `hidden`, made when a kernel asks for it.
        self._marks: mx.array | None = None
        self._visible: mx.array | None = None

    def hide(self, stop: int, counts: Sequence[int]) -> None:
        """Mask the last `counts[i]` columns of row i before `stop`; columns from `stop` on are unmasked."""
        self._widen(stop)
        self.hidden[:, stop:] = False
        for row, count in enumerate(counts):
            self.hidden[row, stop - count : stop] = True
        self._marks = self._visible = None

    def visible(self, columns: int) -> mx.array:
        """Visible slots of the first `columns`, as a mask [rows, 1, 1, columns]."""
        if self._visible is None or self._visible.shape[3] < columns:
            self._visible = (self.marks(columns) == 0)[:, None, None]
        return self._visible[..., :columns]

    def marks(self, columns: int) -> mx.array:
        """`hidden` as a device array, [rows, columns or more], for the ragged-attention kernel."""
        self._widen(columns)
        if self._marks is None:
            self._marks = mx.array(self.hidden.view(np.uint8))
        elif self._marks.shape[1] < columns:
            missing = self.hidden.shape[1] - self._marks.shape[1]
            self._marks = mx.pad(self._marks, [(0, 0), (0, missing)])
        return self._marks

    def _widen(self, columns: int) -> None:
        missing = columns - self.hidden.shape[1]
        if missing > 0:
            self.hidden = np.pad(
                self.hidden, ((0, 0), (0, -(-missing // _GAP_COLUMNS_MAX) * _GAP_COLUMNS_MAX))
            )


class RaggedKVCache(BatchKVCache):
    """mlx-lm's cache of a batch, whose masks leave out `gaps`; a step in which no row is padded needs no mask."""

    # How many columns it grows by. Whenever a row joins or leaves the whole batch is copied, empty columns too. Where
    # the CPU copies, that is as dear as a step; elsewhere attention is at its best with multiples of mlx-lm's own.
    step: int = BatchKVCache.step if on_gpu() else 64

    gaps: Gaps | None = None
    # For the coming step, as `make_room` knows it: where rows stand after it, and that none has padding or a gap.
    offset_after: mx.array | None = None
    is_level = False
    # Whether the device is to begin with the step as far as this layer, while the host goes on with the next ones.
    begins = False
    values: Any
    # Whether `keys` and `values` are arrays that only this cache has, and whether a layer has written into them in
    # place: then they may be the first rows of larger ones.
    _are_own = False
    in_place = False
    _whole: tuple[mx.array, mx.array] | None = None

    @classmethod
    def of(
        cls,
        keys: mx.array | None,
        values: mx.array | None,
        offset: mx.array,
        left_padding: mx.array,
        columns: int,
    ) -> Any:
        """A cache of which the first `columns` are used. Caches of several layers may share arrays."""
        cache: Any = cls.__new__(cls)
        cache.keys, cache.values = keys, values
        cache.offset, cache.left_padding = offset, left_padding
        cache._idx, cache._right_padding = columns, None
        return cache

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:  # noqa: N803
        """The mask of `N` new columns, [rows, 1, N, columns], or None."""
        if N == 1 and self.is_level and self.keys is not None and options.get("window_size") is None:
            return None
        return self._mask_of(N, return_array, **options)()

    def spans(self, count: int) -> Spans | None:
        """Row extents for attention over `count` new columns without a mask; None before the first column."""
        if self.keys is None:
            return None
        columns = self._idx + count
        marks = None if self.gaps is None else self.gaps.marks(columns)
        return Spans(self.left_padding, columns, resident([columns]), marks, self._mask_of(count))

    def _mask_of(self, count: int, return_array: bool = False, **options: Any) -> Callable[[], mx.array]:
        columns, gaps = self._idx + count, self.gaps
        before, padding = self._idx, self.left_padding

        def make() -> mx.array:
            mask: mx.array = create_causal_mask(count, offset=before, left_padding=padding, **options)
            return mask if gaps is None else mask & gaps.visible(columns)

        return make

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Add columns; all of them so far."""
        self.write(keys, values)
        return self.keys_and_values()  # type: ignore[no-untyped-call]

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Add columns."""
        after = self.offset_after
        start, stop = self._idx, self._idx + keys.shape[2]
        if after is None or self.keys is None or stop > self.keys.shape[2]:
            self.offset_after, self.is_level, self.begins = None, False, False
            super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
            self.offset = self.offset if after is None else after
            # If these are all the columns there are, MLX takes the new keys as they are: a part of something larger.
            self._replaced(are_own=keys.shape[2] < self.keys.shape[2])
            return
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        self._replaced(are_own=True)
        if self.advance(keys.shape[2]):
            mx.async_eval(self.keys)  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> Any:
        """Keys [rows, heads, columns, width] and room for more columns."""
        return self._keys

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self._keys = keys
        self._replaced(are_own=False)

    def _replaced(self, *, are_own: bool) -> None:
        """Forget what was known of the previous arrays."""
        self._are_own, self.in_place, self._whole = are_own, False, None

    def all_rows(self) -> tuple[mx.array, mx.array]:
        """Keys and values, and room for more rows. Only what is `in_place` has any."""
        return (self.keys, self.values) if self._whole is None else self._whole

    def show_rows(self, count: int, whole: tuple[mx.array, mx.array]) -> None:
        """Make the batch the first `count` rows of `whole`, the arrays of `all_rows`."""
        self._whole = keys, values = whole
        self._keys, self.values = keys[:count], values[:count]

    @property
    def empty_bytes(self) -> int:
        """Bytes of rows that are allocated and not in the batch."""
        return 0 if self._whole is None else sum(array.nbytes for array in self._whole) - self.nbytes

    def can_write_here(self, count: int, dtype: mx.Dtype) -> bool:
        """Whether `count` new columns may be written in place, unknown to MLX: the cache owns its arrays, since each
        came out of a write of its own."""
        keys = self.keys
        has_room = keys is not None and keys.dtype == dtype and self._idx + count <= keys.shape[2]
        return bool(has_room and self._are_own and self.offset_after is not None)

    def advance(self, count: int) -> bool:
        """Advance by `count` columns that were written; returns whether the device should start on them now."""
        assert self.offset_after is not None
        self._idx += count
        # One array for all layers: to add to one in each is a call a layer.
        self.offset, self.offset_after, self.is_level = self.offset_after, None, False
        begins, self.begins = self.begins, False
        return begins

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """A batch of these rows."""
        if all(cache.empty() for cache in caches):
            return cls([0] * len(caches))
        return super().merge(caches)  # type: ignore[no-untyped-call]


def can_go_back(caches: Caches) -> bool:
    """Whether `go_back` works for these caches of a batch: every layer sees all tokens, and keeps all of them."""
    return all(type(cache) is RaggedKVCache for cache in caches)


def go_back(caches: Caches, counts: Sequence[int], held: Sequence[int]) -> None:
    """Roll back the last `counts[i]` tokens of row i, which then holds `held[i]`. Nothing is copied."""
    first = caches[0]
    common = min(counts)
    stop, gaps = first._idx - common, first.gaps
    if gaps is None and max(counts) > common:
        gaps = Gaps(np.zeros((len(counts), first.keys.shape[2]), np.bool_))
    if gaps is not None:
        gaps.hide(stop, [count - common for count in counts])
    offset = resident(held)
    for cache in caches:
        cache._idx = stop
        cache.offset = offset
        cache.gaps = gaps


def make_room(caches: Caches, columns: int, held: Sequence[int], *, idle: bool = False) -> bool:
    """Before `columns` are added to a batch whose rows hold `held`: close gaps where that is due.

    A cache that is full is copied anyway, so that is the time to close them. While the device is `idle`, it begins with
    the first layers before the host has come to the last. Returns whether the batch was copied for that.
    """
    first, closes = caches[0], False
    if type(first) is RaggedKVCache and first.keys is not None:
        spare = first._idx - max(held)
        is_full = first._idx + columns > first.keys.shape[2]
        if first.gaps is None:
            # Longer rows have left, and the others stayed where they are.
            closes = is_full and spare > 0 and can_go_back(caches)
        else:
            closes = is_full or spare > max(_GAP_COLUMNS_MAX, first._idx * _GAP_SHARE_MAX)
        if closes:
            _justify(caches, held)
    ragged = [cache for cache in caches if type(cache) is RaggedKVCache and cache.keys is not None]
    if ragged:
        first = ragged[0]
        after = resident(first.offset + columns)
        is_level = first.gaps is None and min(held) == first._idx
        for place, cache in enumerate(ragged):
            cache.offset, cache.offset_after, cache.is_level = first.offset, after, is_level
            cache.begins = idle and place % _BEGIN_LAYERS == 1
    return closes


def standing(caches: Caches, columns: int) -> list[mx.array]:
    """Offsets and masked slots that a step adding `columns` reads, as arrays to evaluate before it."""
    first = caches[0]
    if type(first) is not RaggedKVCache or first.keys is None:
        return []
    after = [] if first.offset_after is None else [first.offset_after]
    hidden = [] if first.gaps is None else [first.gaps.marks(first._idx + columns)]
    return [first.offset, *after, *hidden]


def keep_rows(caches: Caches, places: Sequence[int], held: Sequence[int]) -> None:
    """Keep the rows at `places` of a batch with gaps, whose rows hold `held`, and their gaps: to close them would take
    longer than the step."""
    rows = resident(places)
    follow_rows(caches, places, held)
    for cache in caches:
        cache.keys, cache.values = rows_of(cache.keys, rows), rows_of(cache.values, rows)


def follow_rows(caches: Caches, places: Sequence[int], held: Sequence[int]) -> None:
    """Set offsets, padding and masked slots to those of the rows that were at `places`, in unchanged columns."""
    first = caches[0]
    offset = resident([held[place] for place in places])
    left_padding = resident(first.left_padding[resident(places)])
    gaps = None if first.gaps is None else Gaps(first.gaps.hidden[list(places)])
    for cache in caches:
        cache.offset, cache.left_padding, cache.gaps = offset, left_padding, gaps


def close_gaps(caches: Caches, held: Sequence[int]) -> None:
    """Copy a batch with gaps, whose rows hold `held`, to one without."""
    if caches and getattr(caches[0], "gaps", None) is not None:
        _justify(caches, held)


def _justify(caches: Caches, held: Sequence[int]) -> None:
    """Copy a batch so that its rows end in the same column, the longest begins in the first, and none has a gap."""
    longest = max(held)
    index = np.zeros((len(held), with_room(longest)), np.uint32)
    for row, length in enumerate(held):
        index[row, longest - length : longest] = columns_of(caches[0], row, length)
    columns = mx.array(index)
    offset, left_padding = resident(held), resident([longest - length for length in held])
    for cache in caches:
        cache.keys = columns_in_order(cache.keys, columns)
        cache.values = columns_in_order(cache.values, columns)
        cache._idx = longest
        cache.offset = offset
        cache.left_padding = left_padding
        cache.gaps = None


def with_room(columns: int) -> int:
    """The columns of a batch that holds so many, and the next token: it need not be copied again at once."""
    step: int = RaggedKVCache.step
    return (columns // step + 1) * step


def columns_of(cache: Any, place: int, held: int) -> np.ndarray:
    """The columns that the row at `place`, which holds `held` tokens, uses, in order."""
    if cache.gaps is None:
        return np.arange(cache._idx - held, cache._idx, dtype=np.uint32)
    used = np.flatnonzero(~cache.gaps.hidden[place, : cache._idx])
    if cache._idx > cache.gaps.hidden.shape[1]:
        used = np.concatenate([used, np.arange(cache.gaps.hidden.shape[1], cache._idx)])
    return used[len(used) - held :].astype(np.uint32)
