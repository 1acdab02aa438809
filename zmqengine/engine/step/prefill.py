"""Reading prompts in bounded chunks, so that no step of the engine is long."""

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
# Rows that were read together are copied out for the prompt store from this length on.
_COPIED_TOKENS_MIN = 256
# Rows that hold fewer tokens, or up to twice as many as others, may be padded alike.
_ALIKE_TOKENS = 1024
# A prompt that goes on differently after sharing so much is worth telling; it begins with so many tokens there.
_DIVERGED_TOKENS_MIN = 1024
_TOLD_TOKENS = 16
# Chunks that may be on their way at once: the one that computes and the one to come after it.
_CHUNKS_MAX = 2


class Chunk(NamedTuple):
    """What one step reads: `together` are places of rows that end their prompt in one padded call, `slices` are
    (place, tokens) of rows that get a call of their own."""

    together: list[int]
    slices: list[tuple[int, int]]


class Ready(NamedTuple):
    """Rows that have read their prompt but its last token, and their merged caches."""

    rows: list[Row]
    caches: kv.KVBatch


class Prefill:
    """Rows whose prompt is being read.

    A row waits for an older one that reads the same beginning, if that can be kept as far as it is shared.
    They are read in `sizes`; few ones are for models whose caches are all plain.
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
        # With those that have no meaning.
        self.computed_tokens = 0
        self.cached_tokens = 0
        self._sizes = sizes
        self._model = model
        self._store = store
        self._abilities = abilities
        self._kernels = kernels
        self._markers: deque[mx.array] = deque()

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows in; their first chunk is read in the next `next`."""
        self.rows.extend(rows)

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; what they have read is kept for others, if it is good."""
        leaving = {id(row) for row in rows}
        for row in self.rows:
            if id(row) in leaving and row.caches is not None:
                self._offer(row, row.caches)
                self._store.prove(row)
        self.rows = [row for row in self.rows if id(row) not in leaving]

    def take_out(self, row: Row) -> tuple[Caches, None] | None:
        """Drop a row that is here and give what it has read, if anything."""
        self.rows.remove(row)
        return None if not row.held or row.caches is None else (row.caches, None)

    def next(self, tokens_max: int, padding_bytes_max: int, result: StepResult) -> list[Ready]:
        """Read at most `tokens_max` tokens of prompt, padding included; returns the rows that are through.

        The caches of rows that get through together take at most `padding_bytes_max` of padding.
        """
        if not self.rows:
            return []
        self._take_back(result)
        while len(self._markers) >= _CHUNKS_MAX:
            mx.eval(self._markers.popleft())
        rows = pick(self.rows, self._store)
        if not rows:
            return []
        chunk = plan_chunk([self._sizes.whole(row.held, row.remaining) for row in rows], tokens_max)
        touched = [rows[place] for place in chunk.together + [place for place, _ in chunk.slices]]
        for row in touched:
            if row.caches is None:
                self._begin(row, result)
        ready = []
        for place, tokens in chunk.slices:
            row = rows[place]
            self._read_slice(row, self._sizes.part(row.held, row.remaining, tokens))
            if not row.remaining:
                ready.append(self._finish([row]))
        for group in self._groups([rows[place] for place in chunk.together], padding_bytes_max):
            ready.append(self._read_group(group))
        for row in touched:
            done = row.held if row.remaining else row.read_tokens
            result.prefills.append(RowPrefill(row.id, done, row.read_tokens, row.cached))
        through = {id(row) for group in ready for row in group.rows}
        self.rows = [row for row in self.rows if id(row) not in through]
        return ready

    def _groups(self, rows: list[Row], padding_bytes_max: int) -> list[list[Row]]:
        """Rows that can share a call. Those with nothing to read are a group of their own."""
        if not self._abilities.mergeable:
            return [[row] for row in rows]
        groups: dict[tuple[int, int, int], list[Row]] = {}
        for number, row in enumerate(rows):
            # mlx-lm's sliding caches take no padding of width 1, and some state-space models take none at all.
            unread = min(row.remaining, 1) if self._abilities.paddable else row.remaining
            # A row that found much in the prompt cache must not make the others as long as itself.
            alike = (row.held // _ALIKE_TOKENS).bit_length()
            # Who has to stop on the way is read alone.
            alone = number if row.branches else -1
            groups.setdefault((unread, alike, alone), []).append(row)
        parts = []
        for group in groups.values():
            # What a group is padded to when it is through stays for as long as its rows.
            for part in split_by_padding(group, self._abilities.shape.project, padding_bytes_max):
                padding_bytes_max -= padding_bytes(part, self._abilities.shape.project)
                parts.append(part)
        return parts

    def _begin(self, row: Row, result: StepResult) -> None:
        hit = self._store.fetch(row)
        row.held = row.cached = hit.tokens
        row.caches = kv.new_caches(self._model) if hit.caches is None else hit.caches
        if self._sizes.tokens_max and hit.caches is not None:
            # Or the first call that reads on would be a new graph for each number of blocks.
            kv.start(kv.arrays(hit.caches))
        self.cached_tokens += row.held
        if self._store.keeps_states:
            found = branches(row.held, row.read_tokens - 1, hit.known)
            row.branches = sorted({*found, *(stop for stop in row.branches if stop > row.held)})
        if (divergence := _divergence(row, hit)) is not None:
            self._store.counts["divergences"] += 1
            result.divergences.append(divergence)

    def _take_back(self, result: StepResult) -> None:
        """Give rows that were parked their caches again, and report the tokens that were on their way."""
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
            # Its token was made of these caches: they are good.
            if row.caches is not None and self._store.wants(row):
                self._store.accept(self._store.offer(row, row.caches))

    def _read_slice(self, row: Row, count: int) -> None:
        assert row.caches is not None
        end = row.held + count
        while row.held < end:
            stop = min([end, *row.branches])
            size = self._sizes.whole(row.held, stop - row.held)
            kv.read_alone(self._model, row.caches, row.tokens[row.held : stop], size)
            self._launch(row.caches, stop - row.held, size)
            row.held = stop
            if stop in row.branches:
                row.branches.remove(stop)
                self._offer(row, row.caches)

    def _read_group(self, rows: list[Row]) -> Ready:
        if len(rows) > 1 and rows[0].remaining:
            return self._read_together(rows)
        if rows[0].remaining:
            self._read_slice(rows[0], rows[0].remaining)
        return self._finish(rows)

    def _read_together(self, rows: list[Row]) -> Ready:
        unread = [row.tokens[row.held : row.read_tokens - 1] for row in rows]
        size = self._sizes.whole(max(row.held for row in rows), max(map(len, unread)))
        ready = self._finish(rows)
        ready.caches.prefill(self._model, unread, size)
        for row, tokens in zip(rows, unread, strict=True):
            row.held += len(tokens)
        self._launch(ready.caches.caches, sum(map(len, unread)), size * len(rows))
        for place, row in enumerate(rows):
            if row.held >= _COPIED_TOKENS_MIN:
                self._offer(row, ready.caches.row(place))
        return ready

    def _finish(self, rows: list[Row]) -> Ready:
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

    def _launch(self, caches: Caches, count: int, computed: int) -> None:
        self.prompt_tokens += count
        self.computed_tokens += computed
        arrays = kv.arrays(caches)
        # One number of the last array: to wait for it is to wait for the chunk, and it pins no memory.
        marker = arrays[-1][(slice(1),) * arrays[-1].ndim] + 0
        kv.start(marker, arrays)
        self._markers.append(marker)

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
    """Which rows read how much of `remaining` (in order of arrival) in one step of at most `tokens_max` tokens.

    Short prompts go first, several in one call, so a long one never holds them up. The oldest row is sure of a
    quarter of every chunk, so short ones never hold it up for ever. Something is read if anything is left.
    """
    order = sorted(range(len(remaining)), key=remaining.__getitem__)
    together, room = _fit(order, remaining, tokens_max)
    if 0 in together:
        rest = order[len(together) :]
        # A prompt that fits into one chunk is read in one: pieces would take a call of the model each.
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
    """The most rows of `order`, shortest first, that fit into `room` when padded alike; and the room that is left."""
    count, longest = 0, 0
    while count < len(order) and (count + 1) * remaining[order[count]] <= room:
        longest = remaining[order[count]]
        count += 1
    return order[:count], room - count * longest
