"""Prefill: prompts are computed in chunks, so that no step of the engine is long.

`Prefill.step` tells a chunk in reading order. All of a prompt but its last token is prefilled; that one is the input of
the row's first decode step. The host runs ahead of the device by at most two chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.interface import RowDivergence, RowFailure, RowPrefill, RowToken, StepResult
from zmqengine.engine.load.probe import Abilities
from zmqengine.engine.load.prompt_sizes import Sizes
from zmqengine.engine.prefix_cache.branches import branches
from zmqengine.engine.prefix_cache.store import Hit, PrefixCache
from zmqengine.engine.row import Caches, MadeToken, Row
from zmqengine.engine.step.padding import padding_bytes, split_by_padding
from zmqengine.engine.step.prefill_order import pick

# A chunk shorter than this is not worth a model call of its own.
_SLICE_TOKENS_MIN = 16
# Rows that were prefilled together are copied out for the prefix cache from this length on.
_COPIED_TOKENS_MIN = 256
# Rows with fewer cached tokens, or up to twice as many as others, may be padded to one length.
_ALIKE_TOKENS = 1024
# A prompt that diverges from a kept one after this many tokens is reported, with this many tokens from there.
_DIVERGED_TOKENS_MIN = 1024
_TOLD_TOKENS = 16
# Chunks in flight: the one that computes and the one after it.
_CHUNKS_MAX = 2


class Chunk(NamedTuple):
    """The rows of one chunk: `together` are places of rows that end their prompt in one padded call, `slices` are
    (place, tokens) of rows that get a call of their own."""

    together: list[int]
    slices: list[tuple[int, int]]


class Ready(NamedTuple):
    """Rows whose prompt is prefilled but for its last token, and their merged caches."""

    rows: list[Row]
    caches: kv.KVBatch


class Prefill:
    """Rows in prefill.

    A row waits for an older one with the same beginning, if the prefix cache can keep what they share. Chunks have
    `sizes`; few of them suit models whose caches can be rolled back.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixCache,
        abilities: Abilities,
        sizes: Sizes,
        kernels: kv.KVKernels = kv.PLAIN,
    ) -> None:
        self.rows: list[Row] = []
        self.prompt_tokens = 0
        # Padding included.
        self.computed_tokens = 0
        self.cached_tokens = 0
        self._sizes = sizes
        self._model = model
        self._store = store
        self._abilities = abilities
        self._kernels = kernels
        self._markers: deque[mx.array] = deque()

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows; their prefill starts in the next step."""
        self.rows.extend(rows)

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows, and offer their caches to the prefix cache once these have proven finite."""
        leaving = {id(row) for row in rows}
        for row in self.rows:
            if id(row) in leaving and row.caches is not None:
                self._offer(row, row.caches)
                self._store.prove(row)
        self.rows = [row for row in self.rows if id(row) not in leaving]

    def take_out(self, row: Row) -> tuple[Caches, None] | None:
        """Drop a row and return its caches, if it has any."""
        self.rows.remove(row)
        return None if not row.held or row.caches is None else (row.caches, None)

    # --- a chunk ---

    def step(self, tokens_max: int, padding_bytes_max: int, result: StepResult) -> list[Ready]:
        """Start one chunk of at most `tokens_max` tokens, padding included; returns the rows that are through.

        The caches of rows that get through together take at most `padding_bytes_max` of padding.
        """
        self._restore_parked(result)
        while len(self._markers) >= _CHUNKS_MAX:
            mx.eval(self._markers.popleft())
        rows = pick(self.rows, self._store)
        if not rows:
            return []
        chunk = plan_chunk([self._sizes.whole(row.held, row.remaining) for row in rows], tokens_max)
        touched = [rows[place] for place in chunk.together + [place for place, _ in chunk.slices]]
        for row in touched:
            if row.caches is None:
                self._fetch_prefix(row, result)
        ready = []
        for place, tokens in chunk.slices:
            row = rows[place]
            self._prefill_slice(row, self._sizes.part(row.held, row.remaining, tokens))
            if not row.remaining:
                ready.append(self._merge([row]))
        for group in self._groups([rows[place] for place in chunk.together], padding_bytes_max):
            ready.append(self._prefill_group(group))
        for row in touched:
            done = row.held if row.remaining else row.read_tokens
            result.prefills.append(RowPrefill(row.id, done, row.read_tokens, row.cached))
        through = {row for group in ready for row in group.rows}
        self.rows = [row for row in self.rows if row not in through]
        return ready

    def _prefill_slice(self, row: Row, count: int) -> None:
        """Prefill `count` tokens of one row, in a call for each part up to a branch."""
        assert row.caches is not None
        end = row.held + count
        while row.held < end:
            stop = min([end, *row.branches])
            size = self._sizes.whole(row.held, stop - row.held)
            kv.read_alone(self._model, row.caches, row.tokens[row.held : stop], size)
            self._start(row.caches, stop - row.held, size)
            row.held = stop
            if stop in row.branches:
                row.branches.remove(stop)
                self._offer(row, row.caches)

    def _prefill_group(self, rows: list[Row]) -> Ready:
        """Prefill the rest of some rows in one call."""
        if len(rows) > 1 and rows[0].remaining:
            return self._prefill_together(rows)
        if rows[0].remaining:
            self._prefill_slice(rows[0], rows[0].remaining)
        return self._merge(rows)

    def _prefill_together(self, rows: list[Row]) -> Ready:
        """Prefill the rest of several rows in one padded call."""
        unread = [row.tokens[row.held : row.read_tokens - 1] for row in rows]
        size = self._sizes.whole(max(row.held for row in rows), max(map(len, unread)))
        ready = self._merge(rows)
        ready.caches.prefill(self._model, unread, size)
        for row, tokens in zip(rows, unread, strict=True):
            row.held += len(tokens)
        self._start(ready.caches.caches, sum(map(len, unread)), size * len(rows))
        for place, row in enumerate(rows):
            if row.held >= _COPIED_TOKENS_MIN:
                self._offer(row, ready.caches.row(place))
        return ready

    def _merge(self, rows: list[Row]) -> Ready:
        """Merge the caches of rows that are through."""
        caches = [row.caches for row in rows if row.caches is not None]
        if len(rows) == 1:
            self._offer(rows[0], caches[0])
        for row in rows:
            row.caches = None
        if len(rows) == 1:
            if self._abilities.mergeable:
                return Ready(rows, kv.KVBatch.adopt(caches[0], rows[0].held, self._kernels))
            return Ready(rows, kv.KVBatch(caches[0], [rows[0].held], self._kernels))
        return Ready(rows, kv.KVBatch.merge(caches, [row.held for row in rows], self._kernels))

    def _start(self, caches: Caches, count: int, computed: int) -> None:
        """Start a model call of `count` tokens, `computed` with padding."""
        self.prompt_tokens += count
        self.computed_tokens += computed
        arrays = kv.arrays(caches)
        # One number of the last array: waiting for it is waiting for the chunk, and it pins no memory.
        marker = arrays[-1][(slice(1),) * arrays[-1].ndim] + 0
        kv.start(marker, arrays)
        self._markers.append(marker)

    # --- hooks: the prefix cache, parked rows, padding ---

    def _groups(self, rows: list[Row], padding_bytes_max: int) -> list[list[Row]]:
        """Rows that can share a call; rows with nothing to prefill are a group of their own."""
        if not self._abilities.mergeable:
            return [[row] for row in rows]
        groups: dict[tuple[int, int, int], list[Row]] = {}
        for number, row in enumerate(rows):
            # mlx-lm's sliding caches take no padding of width 1, and some state-space models take none at all.
            unread = min(row.remaining, 1) if self._abilities.paddable else row.remaining
            # A row with a long cached prefix must not pad the others to its length.
            alike = (row.held // _ALIKE_TOKENS).bit_length()
            # A row that stops at a branch is prefilled alone.
            alone = number if row.branches else -1
            groups.setdefault((unread, alike, alone), []).append(row)
        parts = []
        for group in groups.values():
            # The padding of a group stays as long as its rows decode.
            for part in split_by_padding(group, self._abilities.shape.project, padding_bytes_max):
                padding_bytes_max -= padding_bytes(part, self._abilities.shape.project)
                parts.append(part)
        return parts

    def _fetch_prefix(self, row: Row, result: StepResult) -> None:
        """Start a row from its longest cached prefix."""
        hit = self._store.fetch(row)
        row.held = row.cached = hit.tokens
        row.caches = kv.new_caches(self._model) if hit.caches is None else hit.caches
        if self._sizes.tokens_max and hit.caches is not None:
            # Or the first call after them would be a new CUDA graph for each number of blocks.
            kv.start(kv.arrays(hit.caches))
        self.cached_tokens += row.held
        if self._store.keeps_states:
            found = branches(row.held, row.read_tokens - 1, hit.known)
            row.branches = sorted({*found, *(stop for stop in row.branches if stop > row.held)})
        if (divergence := _divergence(row, hit)) is not None:
            self._store.counts["divergences"] += 1
            result.divergences.append(divergence)

    def _restore_parked(self, result: StepResult) -> None:
        """Give parked rows their caches back, and report the tokens that were in flight when they were parked."""
        for row in self.rows:
            parked = self._store.parked.take(row) if row.caches is None else None
            if parked is None:
                continue
            row.held, row.caches, row.cached = parked.held, parked.caches, parked.reusable
            self.cached_tokens += row.cached
            if parked.made is not None:
                self._report(row, parked.made, result)
        self.rows = [row for row in self.rows if not row.gone]

    def _report(self, row: Row, made: MadeToken, result: StepResult) -> None:
        row.sampled += 1
        try:
            finish = row.take(made.token)
        except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
            row.gone = True
            result.failures.append(RowFailure(row.id, f"the constraint failed: {error}"))
            return
        result.tokens.append(RowToken(row.id, made.token, made.logprobs, finish))
        if finish is not None:
            row.gone = True
            result.prefills.append(RowPrefill(row.id, row.read_tokens, row.read_tokens, row.cached))
            # Its token came from these caches, so they are finite.
            if row.caches is not None and self._store.wants(row):
                self._store.accept(self._store.offer(row, row.caches))

    def _offer(self, row: Row, source: kv.Source) -> None:
        if self._store.wants(row) and (offer := self._store.offer(row, source)) is not None:
            row.offers.append(offer)


def _divergence(row: Row, hit: Hit) -> RowDivergence | None:
    total = row.read_tokens
    if hit.differs is None or hit.known < max(_DIVERGED_TOKENS_MIN, total // 2):
        return None
    came = row.ids[hit.known : hit.known + _TOLD_TOKENS].tolist()
    return RowDivergence(row.id, hit.known, total, hit.differs[:_TOLD_TOKENS].tolist(), came)


def plan_chunk(remaining: Sequence[int], tokens_max: int) -> Chunk:
    """Divide a chunk of at most `tokens_max` tokens among rows with `remaining` tokens, in order of arrival.

    Short prompts go first, several in one call, so a long one never holds them up. The oldest row gets at least a
    quarter of every chunk, so short ones never starve it. A chunk is never empty while tokens remain.
    """
    order = sorted(range(len(remaining)), key=remaining.__getitem__)
    together, room = _fit(order, remaining, tokens_max)
    if 0 in together:
        rest = order[len(together) :]
        # A prompt that fits into one chunk waits for one: each piece would take a model call.
        if rest and room >= _SLICE_TOKENS_MIN and remaining[rest[0]] > tokens_max:
            return Chunk(together, [(rest[0], room)])
        return Chunk(together, [])
    share = min(remaining[0], max(1, tokens_max // 4))
    order.remove(0)
    together, room = _fit(order, remaining, tokens_max - share)
    rest = order[len(together) :]
    if rest and room >= _SLICE_TOKENS_MIN and remaining[rest[0]] < remaining[0]:
        return Chunk(together, [(0, share), (rest[0], min(room, remaining[rest[0]]))])
    return Chunk(together, [(0, min(remaining[0], share + room))])


def _fit(order: list[int], remaining: Sequence[int], room: int) -> tuple[list[int], int]:
    """The most rows of `order`, shortest first, that fit into `room` when padded to one length; and the room left."""
    count, longest = 0, 0
    while count < len(order) and (count + 1) * remaining[order[count]] <= room:
        longest = remaining[order[count]]
        count += 1
    return order[:count], room - count * longest
