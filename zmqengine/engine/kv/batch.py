"""KV caches of a batch, with one owner: only `KVBatch` changes them outside the model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv import in_place, plain, ragged, reading
from zmqengine.engine.kv.parts import Part, parts_of
from zmqengine.engine.kv.ragged import RaggedKVCache, close_gaps, columns_of, make_room, standing
from zmqengine.engine.kv.rows import arrays, as_batch, byte_count, start
from zmqengine.engine.models.mlx_lm import BatchRotatingKVCache, KVCache
from zmqengine.engine.row import Caches


class KVBatch:
    """The KV caches of a batch of rows: `caches`, one for each layer, to be given to the model.

    `lengths`: cached tokens of each row, those of a verify block in flight included. A model whose rows cannot be
    merged has batches of one row with that row's own caches.
    """

    def __init__(self, caches: Caches | None = None, lengths: Sequence[int] = ()) -> None:
        self.caches: Caches = caches or []
        self.lengths = list(lengths)
        # Counts changes of the rows: a `BatchRow` made before the last one is stale.
        self._generation = 0
        self._changed = True
        # Copies for the prefix cache that have not been started.
        self._copies: list[mx.array] = []

    @classmethod
    def merge(cls, rows: Sequence[Caches], lengths: Sequence[int]) -> KVBatch:
        """Copy caches of single rows, which hold `lengths` tokens, into a batch; they stay as they are."""
        return cls(_merge(rows), lengths)

    @classmethod
    def adopt(cls, caches: Caches, length: int) -> KVBatch:
        """Make a batch of one row out of its own caches, without a copy."""
        return cls(as_batch(caches), [length])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def byte_count(self) -> int:
        """Bytes of the rows' caches."""
        return byte_count(self.caches)

    @property
    def empty_bytes(self) -> int:
        """Bytes of allocated rows that no request uses."""
        return in_place.empty_bytes(self.caches)

    @property
    def can_roll_back(self) -> bool:
        """Whether `roll_back` works: every layer sees all tokens of a row, and keeps all of them."""
        return ragged.can_go_back(self.caches)

    def join(self, other: KVBatch) -> None:
        """Add the rows of `other`, which must not be used any more, after those of this batch."""
        self.start_copies()
        other.start_copies()
        if not self.caches:
            self.caches = other.caches
        elif not in_place.extend(self.caches, other.caches):
            close_gaps(self.caches, self.lengths)
            _extend(self.caches, other.caches)
        self.lengths += other.lengths
        self._rows_changed()

    def keep_rows(self, places: Sequence[int]) -> list[int]:
        """Keep the rows at `places` only, and return `places` in their new order, since rows may move into freed slots.

        Copies that were cut out of the batch are started before.
        """
        self.start_copies()
        order = list(places)
        if in_place.moves_rows(self.caches):
            order = in_place.arranged(order)
        if not order:
            self.caches = []
        elif not in_place.keep_rows(self.caches, order, self.lengths):
            _keep_rows(self.caches, order, self.lengths)
        self.lengths = [self.lengths[place] for place in order]
        self._rows_changed()
        return order

    def begin_step(self, inputs: mx.array, *, idle: bool = False) -> Caches:
        """Make room for a step that reads `inputs` [rows, columns], and return the caches for the model.

        While the device is `idle`, it starts on the first layers before the host has built the last ones. What rows
        that came and went left to compute is started apart from the step, and so are the offsets of a step of several
        columns: CUDA graphs are kept, and in one with the step each combination would be a new graph.
        """
        columns = inputs.shape[1]
        copied = make_room(self.caches, columns, self.lengths, idle=idle) or self._changed
        self._changed = False
        if on_cuda() and (copied or columns > 1):
            offsets = standing(self.caches, columns) if columns > 1 else []
            start(inputs, offsets, arrays(self.caches) if copied else [])
        self.lengths = [length + columns for length in self.lengths]
        return self.caches

    def roll_back(self, counts: Sequence[int]) -> None:
        """Drop the last `counts[i]` tokens of row i. Nothing is copied."""
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        ragged.go_back(self.caches, counts, self.lengths)

    def prefill(self, model: Any, texts: Sequence[Sequence[int]], size: int = 0) -> mx.array:
        """Read a text for each row in one call of the model, shorter ones padded; returns the logits, not computed yet.

        With a larger `size` all texts are padded to it.
        """
        logits = reading.read_together(model, self.caches, texts, size)
        self.lengths = [length + len(text) for length, text in zip(self.lengths, texts, strict=True)]
        return logits

    def extract(self, place: int, length: int | None = None) -> Caches:
        """Copy the caches of one row, and start the copy.

        Only its first `length` tokens where the batch can roll back, else all.
        """
        held = self.lengths[place]
        wanted = held if length is None else length
        found = [
            _extract_kv(cache, place, held, wanted)
            if type(cache) is RaggedKVCache and cache.keys is not None
            else cache.extract(place)
            for cache in self.caches
        ]
        start(arrays(found))
        return found

    def row(self, place: int) -> BatchRow:
        """The row at `place`, as a source for the prefix cache."""
        return BatchRow(self, place)

    def leaving(self, places: Sequence[int]) -> dict[int, BatchRow]:
        """Rows at `places`, in ascending order, as sources for the prefix cache; short ones are copied together."""
        parts = parts_of(places, self.lengths)
        return {place: BatchRow(self, place, parts[place]) for place in places}

    def cut(self, copies: list[mx.array]) -> None:
        """Note copies that are built and not started: they are started before a row leaves or another joins."""
        self._copies += copies

    def start_copies(self) -> None:
        """Start the copies that were cut out of the batch."""
        if self._copies:
            start(self._copies)
            self._copies = []

    def _rows_changed(self) -> None:
        self._generation += 1
        self._changed = True


class BatchRow:
    """A row of a batch, until rows join or leave: where its columns stand, for copies.

    `part`: rows that are copied together with it, if there are any.
    """

    def __init__(self, batch: KVBatch, place: int, part: Part | None = None) -> None:
        self._batch = batch
        self._generation = batch._generation
        self.place = place
        self.part = part

    @property
    def length(self) -> int:
        """Cached tokens, those of a verify block in flight included."""
        return self._batch.lengths[self.place]

    @property
    def caches(self) -> Caches:
        """The caches of the batch. Raises AssertionError if its rows have changed, since this row may have moved."""
        assert self._generation == self._batch._generation, (
            "a row of a batch is read after the batch has changed"
        )
        return self._batch.caches

    def cut(self, copies: list[mx.array]) -> None:
        """Note copies of this row; see `KVBatch.cut`."""
        self._batch.cut(copies)


def can_merge(caches: Caches) -> bool:
    """Whether rows with such caches can be stepped together."""
    return all(hasattr(cache, "merge") for cache in caches)


def _merge(rows: Sequence[Caches]) -> Caches:
    layers = list(zip(*rows, strict=True))
    plain_layers = [layer for layer in layers if plain.are_plain_rows(layer)]
    merged = iter(plain.merge(plain_layers) if plain_layers else [])
    return [
        next(merged)
        if plain.are_plain_rows(layer)
        else RaggedKVCache.merge(layer)
        if all(type(cache) is KVCache for cache in layer)
        else layer[0].merge(list(layer))
        for layer in layers
    ]


def _extend(caches: Caches, others: Caches) -> None:
    pairs = list(zip(caches, others, strict=True))
    alike = [pair for pair in pairs if all(map(plain.is_plain, pair))]
    if alike:
        plain.extend([cache for cache, _ in alike], [other for _, other in alike])
    for cache, other in pairs:
        if not (plain.is_plain(cache) and plain.is_plain(other)):
            cache.extend(other)


def _keep_rows(caches: Caches, places: list[int], held: Sequence[int]) -> None:
    if getattr(caches[0], "gaps", None) is not None:
        ragged.keep_rows(caches, places, held)
        return
    plain.keep_rows(filter(plain.is_plain, caches), places, held)
    for cache in caches:
        if type(cache) is BatchRotatingKVCache and cache.keys is not None:
            _keep_rows_of_window(cache, mx.array(places), [held[place] for place in places])
        elif not plain.is_plain(cache):
            cache.filter(places)


def _keep_rows_of_window(cache: Any, index: mx.array, lengths: list[int]) -> None:
    # BatchRotatingKVCache.filter keeps all the columns, also when no row that stays has filled its window.
    cache.filter(index)
    spare = cache.keys.shape[2] if cache.rotated else cache._idx
    spare -= max(lengths)
    if spare <= 0:
        return
    cache._temporal_order()
    cache.keys = mx.contiguous(cache.keys[..., spare : cache._idx, :])
    cache.values = mx.contiguous(cache.values[..., spare : cache._idx, :])
    cache._idx -= spare
    cache._offset = cache._idx
    cache.left_padding -= spare


def _extract_kv(cache: Any, place: int, held: int, wanted: int) -> KVCache:
    single = KVCache()  # type: ignore[no-untyped-call]
    span: Any = slice(cache._idx - held, cache._idx - held + wanted)
    if cache.gaps is not None:
        span = mx.array(columns_of(cache, place, held)[:wanted])
    single.keys = mx.contiguous(cache.keys[place : place + 1, :, span])
    single.values = mx.contiguous(cache.values[place : place + 1, :, span])
    single.offset = wanted
    return single
