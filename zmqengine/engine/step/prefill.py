"""Prefill: prompts are computed in chunks, so that no step of the engine is long.

`Prefill.begin` and `complete` tell a chunk in reading order. All of a prompt but its last token is prefilled; that one
is the input of the row's first decode step. The host runs ahead of the device by at most two chunks.

Texts are prefilled like prompts, and their hidden states go to `read`: then they are through.

Forced output is prefilled like a prompt, and logits are computed only for it: `score` takes those of a chunk, `report`
hands their log-probabilities out with the next step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.interface import RowDivergence, RowFailure, RowImage, RowPrefill, RowToken, StepResult
from zmqengine.engine.load.probe import Abilities
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.prefix_cache.branches import branches
from zmqengine.engine.prefix_cache.store import Hit, PrefixCache
from zmqengine.engine.row import Caches, Row, SampledToken, constraint_failure
from zmqengine.engine.sampling.sampler import LogprobArrays, measure, read_logprobs
from zmqengine.engine.step.packed import forward, read_lazily
from zmqengine.engine.step.padding import padding_bytes, split_by_padding
from zmqengine.engine.step.prefill_order import pick
from zmqengine.engine.vision.seeing import Seeing, positions
from zmqengine.sampling_params import TOKEN_ID_MAX

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


class _Begun(NamedTuple):
    """A segment of a chunk; None for rows that have nothing to prefill. Several rows have `merged` caches."""

    rows: list[Row]
    segment: Segment | None
    merged: Ready | None = None


class _Forced(NamedTuple):
    """The next forced tokens of a row, and their log-probabilities on the device if the row wants any."""

    row: Row
    tokens: list[int]
    logprobs: LogprobArrays | None


class Prefill:
    """Rows in prefill.

    A row waits for an older one with the same beginning, if the prefix cache can keep what they share. Logits of at
    most `logits_max` tokens are computed at once.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixCache,
        abilities: Abilities,
        kernels: kv.KVKernels = kv.PLAIN,
        seeing: Seeing | None = None,
        *,
        logits_max: int = 1,
    ) -> None:
        self.rows: list[Row] = []
        self.prompt_tokens = 0
        # Padding included.
        self.launched_tokens = 0
        self.cached_tokens = 0
        self._model = model
        self._store = store
        self._abilities = abilities
        self._kernels = kernels
        # A model that is not packed reads its weights for each call.
        self._apart_max = kernels.prompts_apart if hasattr(model, "packed") else 0
        self._packs_texts = bool(getattr(model, "packs_texts", False))
        self.texts_caches: Caches = []
        """KV caches of the last segment of texts, for the next one: new ones are two arrays a layer."""
        self._seeing = seeing
        # One of each chunk in flight: a chunk that is waited for leaves the device without work while the host builds
        # the next.
        self._markers: deque[mx.array] = deque()
        # The chunk between its begin and its end.
        self._begun: list[_Begun] = []
        self._logits_max = logits_max
        self.forced: list[_Forced] = []
        self.read: list[tuple[list[Row], mx.array]] = []
        """Texts and the hidden states of their tokens in the begun chunk."""
        # Arrays of each layer of the segments that are built and not started.
        self._unstarted: list[list[list[mx.array]]] | None = None

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
        return None if not row.computed_tokens or row.caches is None else (row.caches, None)

    # --- a chunk ---

    def begin(
        self,
        tokens_max: int,
        padding_bytes_max: int,
        result: StepResult,
        texts: Sequence[tuple[Row, int]] = (),
    ) -> list[Segment]:
        """Begin one chunk; returns its segments of the packed step.

        It has at most `tokens_max` tokens of prompts, padding included, and of each of `texts` the tokens beside it.
        `complete` must follow the model's call. The caches of rows that get through together take at most
        `padding_bytes_max` of padding.
        """
        self._restore_parked(result)
        while len(self._markers) >= _CHUNKS_MAX:
            mx.eval(self._markers.popleft())
        self._begun = []
        if rows := self._readable():
            self._begin_prompts(rows, tokens_max, padding_bytes_max, result)
        if texts:
            self._begin_texts(texts, padding_bytes_max, result)
        return [begun.segment for begun in self._begun if begun.segment is not None]

    def _begin_prompts(
        self, rows: Sequence[Row], tokens_max: int, padding_bytes_max: int, result: StepResult
    ) -> None:
        lengths = [row.remaining if self._seeing is None else self._seeing.readable(row) for row in rows]
        chunk = plan_chunk(lengths, tokens_max)
        for index in chunk.together + [index for index, _ in chunk.slices]:
            if rows[index].caches is None:
                self._fetch_prefix(rows[index], result)
        if self._seeing is not None:
            chunk = _up_to_images(chunk, rows, self._seeing)
        for index, tokens in chunk.slices:
            self._begin_slice(rows[index], tokens)
        for group in self._groups([rows[index] for index in chunk.together], padding_bytes_max):
            self._begin_group(group)

    def _begin_texts(
        self, texts: Sequence[tuple[Row, int]], padding_bytes_max: int, result: StepResult
    ) -> None:
        whole, side_by_side = [], []
        for row, tokens in texts:
            if row.caches is None and row.reuses_prefix:
                self._fetch_prefix(row, result)
            is_whole = tokens == row.remaining
            if is_whole and self._packs_texts and row.caches is None and not row.branches:
                side_by_side.append(row)
                continue
            if row.caches is None:
                row.caches = kv.new_caches(self._model)
            if is_whole:
                whole.append(row)
            else:
                self._begin_slice(row, tokens)
        if side_by_side:
            self._begun.append(_Begun(side_by_side, self._side_by_side(side_by_side)))
        for group in self._groups(whole, padding_bytes_max):
            self._begin_group(group)

    def begin_lazily(
        self, texts: Sequence[tuple[Row, int]], padding_bytes_max: int, result: StepResult
    ) -> None:
        """Begin a chunk of `texts` alone, as `begin`, and build its model calls; `read` has their hidden states.

        `complete_lazily` must follow.
        """
        self._unstarted = []
        self._begun = []
        self._begin_texts(texts, padding_bytes_max, result)
        segments = [begun.segment for begun in self._begun if begun.segment is not None]
        self.score([read_lazily(self._model, segment) for segment in segments])

    def complete_lazily(self, result: StepResult) -> list[list[mx.array]]:
        """End the chunk of `begin_lazily`; returns the arrays to compute, a list for each layer."""
        self.complete(result)
        unstarted, self._unstarted = self._unstarted, None
        assert unstarted is not None, "begin_lazily came first"
        return [[array for segment in layer for array in segment] for layer in zip(*unstarted, strict=True)]

    def score(self, logits: Sequence[mx.array]) -> None:
        """Take the logits of forced tokens from `logits` [rows, width, vocab], those of the begun segments, and
        hidden states."""
        begun = [(rows, segment) for rows, segment, _ in self._begun if segment is not None]
        self.read = []
        for (rows, segment), found in zip(begun, logits, strict=False):
            if rows[0].place is None:
                self._score(rows[0], found)
            else:
                self.read.append((rows, _padded(found, segment.lengths)))

    def wanted_image(self) -> tuple[Row, RowImage] | None:
        """The image that rows need next, if any."""
        if self._seeing is None or not any(row.features for row in self.rows):
            return None
        return self._seeing.wanted(pick(self.rows, self._store))

    @property
    def has_readable(self) -> bool:
        """Whether a chunk now would have a row: not all of them wait for images."""
        return bool(self._readable())

    def _readable(self) -> list[Row]:
        """The rows that may prefill now, the oldest first."""
        rows = pick(self.rows, self._store)
        if self._seeing is None:
            return rows
        return [row for row in rows if not row.remaining or self._seeing.readable(row)]

    def complete(self, result: StepResult) -> list[Ready]:
        """Start the chunk that was begun; returns the rows whose prefill is complete, for decode."""
        ready = []
        whole = []
        self._start_begun()
        for rows, segment, merged in self._begun:
            if segment is not None and segment.lengths:
                self.prompt_tokens += segment.inputs.size
                for row in rows:
                    row.computed_tokens, row.caches = row.prefill_end, None
                continue
            if merged is not None:
                if segment is not None:
                    self._complete_group(rows, merged.caches)
                if rows[0].place is None:
                    ready.append(merged)
                continue
            if segment is not None:
                self._complete_slice(rows[0], segment)
            if not rows[0].remaining:
                if rows[0].place is not None:
                    rows[0].caches = None
                elif rows[0].sampled < rows[0].max_tokens:
                    ready.append(self._merge(rows))
                else:
                    # All of its output is forced.
                    whole.append(rows[0])
        touched = [row for begun in self._begun for row in begun.rows if row.place is None]
        for row in touched:
            done = row.computed_tokens if row.remaining else row.prefill_tokens
            result.prefills.append(RowPrefill(row.id, done, row.prefill_tokens, row.cached))
        through = {row for group in ready for row in group.rows}
        self.rows = [row for row in self.rows if row not in through]
        self.leave(whole)
        self._begun = []
        return ready

    def _begin_slice(self, row: Row, count: int) -> None:
        """Begin to prefill `count` tokens of one row.

        Those before a branch, and forced ones over `logits_max`, are read in calls of their own, at once.
        """
        end = row.computed_tokens + count
        while (stop := self._next_stop(row, end)) < end:
            segment = self._segment(row, stop)
            self._score(row, forward(self._model, [segment])[0])
            kv.end_row_prefill(segment.caches)
            self._start([segment])
            self._complete_slice(row, segment)
        self._begun.append(_Begun([row], self._segment(row, end)))

    def _next_stop(self, row: Row, end: int) -> int:
        """The end of the next call of a row, at most `end`."""
        stops = [end, *row.branches[:1]]
        if row.has_forced and row.logprobs is not None:
            # The logits that predict the first forced token are those of the token before it.
            first = row.first_forced - 1
            stops.append(first if row.computed_tokens < first else row.computed_tokens + self._logits_max)
        return min(stops)

    def _segment(self, row: Row, end: int) -> Segment:
        """The tokens of a row up to `end`, as a segment of a step."""
        assert row.caches is not None
        inputs = kv.begin_row_prefill(
            row.caches, row.tokens[row.computed_tokens : end], prompt_tokens=row.prefill_end
        )
        return self._seeing_segment(inputs, row.caches, [row])

    def _side_by_side(self, texts: Sequence[Row]) -> Segment:
        """A segment of whole texts, none of whose KV caches are needed later."""
        tokens = [token for row in texts for token in row.tokens[: row.prefill_end]]
        if kv.room(self.texts_caches) < len(tokens):
            self.texts_caches = kv.new_caches(self._model)
        inputs = kv.begin_row_prefill(self.texts_caches, tokens, prompt_tokens=len(tokens))
        return Segment(inputs, self.texts_caches, reads=True, lengths=[row.remaining for row in texts])

    def _seeing_segment(self, inputs: mx.array, caches: Caches, rows: Sequence[Row]) -> Segment:
        if self._seeing is None or rows[0].place is not None:
            return Segment(inputs, caches, reads=rows[0].place is not None)
        return Segment(
            inputs,
            caches,
            self._seeing.embeddings(inputs, rows),
            positions=positions(inputs, rows),
            deep=self._seeing.deep(inputs, rows),
        )

    def _complete_slice(self, row: Row, segment: Segment) -> None:
        """Note that a segment of one row was started, and offer its caches to the prefix cache at a branch."""
        row.computed_tokens += segment.inputs.size
        self.prompt_tokens += segment.inputs.size
        if row.computed_tokens in row.branches:
            row.branches.remove(row.computed_tokens)
            self._offer(row, segment.caches)

    def _begin_group(self, rows: list[Row]) -> None:
        """Begin to prefill the rest of some rows in one segment."""
        if not rows[0].remaining:
            merged = self._merge(rows) if len(rows) > 1 else None
            self._begun.append(_Begun(rows, None, merged))
        elif len(rows) == 1:
            self._begin_slice(rows[0], rows[0].remaining)
        else:
            unread = [row.tokens[row.computed_tokens : row.prefill_end] for row in rows]
            merged = self._merge(rows)
            inputs = merged.caches.begin_prefill(unread)
            segment = self._seeing_segment(inputs, merged.caches.caches, rows)
            self._begun.append(_Begun(rows, segment, merged))

    def _complete_group(self, rows: list[Row], caches: kv.KVBatch) -> None:
        """Note that a segment of several rows was started, and offer the long ones to the prefix cache."""
        self.prompt_tokens += sum(row.remaining for row in rows)
        for index, row in enumerate(rows):
            row.computed_tokens = row.prefill_end
            if row.place is None and row.computed_tokens >= _COPIED_TOKENS_MIN:
                self._offer(row, caches.row(index))

    def _merge(self, rows: list[Row]) -> Ready:
        """Merge the caches of rows that are through."""
        caches = [row.caches for row in rows if row.caches is not None]
        if len(rows) == 1:
            self._offer(rows[0], caches[0])
        for row in rows:
            row.caches = None
        if len(rows) == 1:
            if self._abilities.mergeable:
                return Ready(rows, kv.KVBatch.adopt(caches[0], rows[0].computed_tokens, self._kernels))
            return Ready(rows, kv.KVBatch(caches[0], [rows[0].computed_tokens], self._kernels))
        return Ready(rows, kv.KVBatch.merge(caches, [row.computed_tokens for row in rows], self._kernels))

    def _start_begun(self) -> None:
        """Start the segments of the begun chunk."""
        segments = []
        for rows, segment, merged in self._begun:
            if segment is None:
                continue
            if segment.lengths:
                # Their vectors, which are started, are all that reads these caches; rewound, they keep no array of
                # the step.
                self.texts_caches = kv.rewound(self.texts_caches)
                self.launched_tokens += segment.inputs.size
                continue
            segments.append(segment)
            if merged is None:
                kv.end_row_prefill(segment.caches)
            elif rows[0].place is None:
                merged.caches.end_prefill()
        if segments and (marker := self._start(segments)) is not None:
            self._markers.append(marker)

    def _start(self, segments: Sequence[Segment]) -> mx.array | None:
        """Start segments; returns a marker, which is computed when they are. None where they start layer by layer."""
        if self._unstarted is not None:
            self._unstarted += [[kv.arrays([cache]) for cache in segment.caches] for segment in segments]
            return None
        self.launched_tokens += sum(segment.inputs.size for segment in segments)
        arrays = [kv.arrays(segment.caches) for segment in segments]
        # One number of the last array, which pins no memory.
        last = arrays[-1][-1]
        marker: mx.array = last[(slice(1),) * last.ndim] + 0
        measured = [each.logprobs for each in self.forced if each.logprobs is not None]
        kv.start(marker, arrays, [one for logprobs in measured for one in logprobs if one is not None])
        return marker

    # --- forced tokens ---

    def _score(self, row: Row, logits: mx.array) -> None:
        """Note the forced tokens that `logits` [1, width, vocab] of the row's next tokens predict."""
        start, width = row.computed_tokens, logits.shape[1]
        first = max(start + 1, row.first_forced)
        tokens = row.tokens[first : start + 1 + width]
        if not row.has_forced or not tokens:
            return
        logprobs = None
        if row.logprobs is not None:
            # [tokens, vocab]
            predicting = logits[0, first - 1 - start :]
            logprobs = measure(predicting, mx.array(tokens, dtype=mx.uint32), row.logprobs)
        self.forced.append(_Forced(row, tokens, logprobs))

    def report(self, result: StepResult) -> list[Row]:
        """Wait for the forced tokens of the last chunk and report them; returns the rows that failed."""
        forced, self.forced = self.forced, []
        failed = []
        for row, tokens, arrays in forced:
            if row.gone:
                continue
            entries = [None] * len(tokens) if arrays is None else read_logprobs(arrays)
            if any(entry is not None and not math.isfinite(entry.logprob) for entry in entries):
                row.leave()
                failed.append(row)
                result.failures.append(RowFailure(row.id, "the model's output for this row is not a number"))
                continue
            row.unreported -= len(tokens)
            result.forced += len(tokens)
            is_whole = not row.unreported and row.sampled >= row.max_tokens
            result.tokens += [RowToken(row.id, *each, None) for each in zip(tokens, entries, strict=True)]
            if is_whole:
                row.leave()
                result.tokens[-1] = result.tokens[-1]._replace(finish="length")
        return failed

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
            alike = (row.computed_tokens // _ALIKE_TOKENS).bit_length()
            # A row that stops at a branch, or whose logits are wanted, is prefilled alone, and the rest of a text.
            is_rest = row.place is not None and row.computed_tokens > row.cached
            may_be_own = row.place is None and self._apart_max > 0
            is_own = may_be_own and (row.computed_tokens > 0 or len(rows) <= self._apart_max)
            alone = number if row.branches or row.has_forced or is_rest or is_own else -1
            groups.setdefault((unread, alike, alone), []).append(row)
        parts = []
        for group in groups.values():
            # The padding of a group stays as long as its rows decode.
            for part in split_by_padding(group, self._abilities.shape.project, padding_bytes_max):
                padding_bytes_max -= padding_bytes(part, self._abilities.shape.project)
                parts.append(part)
        return parts

    def _fetch_prefix(self, row: Row, result: StepResult) -> None:
        """Start a row from its longest cached prefix. A text without one has no caches then."""
        hit = self._store.fetch(row)
        row.computed_tokens = row.cached = hit.tokens
        row.caches = hit.caches
        self.cached_tokens += row.computed_tokens
        if row.place is not None:
            return
        if row.caches is None:
            row.caches = kv.new_caches(self._model)
        if self._store.keeps_states:
            found = branches(row.computed_tokens, row.prefill_tokens - 1, hit.known)
            row.branches = sorted({*found, *(stop for stop in row.branches if stop > row.computed_tokens)})
        if (divergence := _divergence(row, hit)) is not None:
            self._store.counts["divergences"] += 1
            result.divergences.append(divergence)

    def _restore_parked(self, result: StepResult) -> None:
        """Give parked rows their caches back, and report the tokens that were in flight when they were parked."""
        for row in self.rows:
            # One whose forced tokens are still wanted was never parked.
            parked = self._store.parked.take(row) if row.caches is None and not row.has_forced else None
            if parked is None:
                continue
            row.computed_tokens, row.caches, row.cached = (
                parked.computed_tokens,
                parked.caches,
                parked.reusable,
            )
            self.cached_tokens += row.cached
            if parked.sampled is not None:
                self._report(row, parked.sampled, result)
        self.rows = [row for row in self.rows if not row.gone]

    def _report(self, row: Row, made: SampledToken, result: StepResult) -> None:
        row.sampled += 1
        try:
            finish = row.take(made.token)
        except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
            row.leave()
            result.failures.append(constraint_failure(row.id, error))
            return
        result.tokens.append(RowToken(row.id, made.token, made.logprobs, finish))
        if finish is not None:
            row.leave()
            result.prefills.append(RowPrefill(row.id, row.prefill_tokens, row.prefill_tokens, row.cached))
            # Its token came from these caches, so they are finite.
            if row.caches is not None and self._store.wants(row):
                self._store.accept(self._store.offer(row, row.caches))

    def _offer(self, row: Row, source: kv.Source) -> None:
        if self._store.wants(row) and (offer := self._store.offer(row, source)) is not None:
            row.offers.append(offer)


def _padded(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
    """Hidden states [texts, tokens, dim], padded at the end, of texts of these `lengths` that are side by side."""
    if not lengths:
        return hidden
    stops = np.cumsum(lengths)
    places = (stops - lengths)[:, None] + np.arange(max(lengths))
    return hidden[0][mx.array(np.minimum(places, stops[:, None] - 1))]


def _divergence(row: Row, hit: Hit) -> RowDivergence | None:
    total = row.prefill_tokens
    if hit.differs is None or hit.known < max(_DIVERGED_TOKENS_MIN, total // 2):
        return None
    came = row.tokens[hit.known : hit.known + _TOLD_TOKENS]
    # The difference may be an image, which has a name here and no token id.
    kept = [token for token in hit.differs[:_TOLD_TOKENS].tolist() if token <= TOKEN_ID_MAX]
    return RowDivergence(row.id, hit.known, total, kept, came)


def _up_to_images(chunk: Chunk, rows: Sequence[Row], seeing: Seeing) -> Chunk:
    """A chunk in which rows that wait for images stop before them, and are not through."""
    together: list[int] = []
    slices: list[tuple[int, int]] = []
    for place in chunk.together:
        count = seeing.readable(rows[place])
        if count == rows[place].remaining:
            together.append(place)
        elif count:
            slices.append((place, count))
    for place, tokens in chunk.slices:
        if count := min(tokens, seeing.readable(rows[place])):
            slices.append((place, count))
    return Chunk(together, slices)


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
