"""Drafts of a smaller model with the same vocabulary, stepped for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.sampler import Plan, choose, plan_draw
from zmqengine.engine.speculation.source import Outlook
from zmqengine.engine.speculation.start_costs import measure_widths
from zmqengine.engine.speculation.step_costs import StepCosts
from zmqengine.engine.speculation.trial import Trial

DRAFT_TOKENS_MAX = 8
_READ_TOKENS_MAX = 512
_GAIN = 0.1
# While it is tried out.
_TRIAL_TOKENS_MAX = 3
# Below this it does not draft for a row.
_CHANCE_MIN = 0.25
# A row whose drafts are not worth their time tries again after so many steps, and then after twice as many.
_PATIENCE_STEPS, _PATIENCE_STEPS_MAX = 64, 4096


class DraftState:
    """State of one row: the probability that a draft token is accepted, and steps since its last draft."""

    __slots__ = ("chance", "idle", "patience")

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.idle = 0
        self.patience = _PATIENCE_STEPS

    def ask(self, trial: Trial) -> None:
        """One more step in which it may draft."""
        self.idle += 1
        if not trial.is_over:
            self.chance = trial.chance
        elif self.idle > self.patience:
            self.idle, self.patience = 0, min(2 * self.patience, _PATIENCE_STEPS_MAX)
            self.chance = max(self.chance, trial.chance)

    def judged(self, right: Sequence[bool]) -> None:
        """Which tokens of a draft were accepted, up to the first that was not."""
        self.idle = 0
        for is_right in right:
            self.chance += _GAIN * (is_right - self.chance)
        if any(right):
            self.patience = _PATIENCE_STEPS


class _Reading:
    """The text of a row, read into caches of its own. It `is_done` when just its last tokens are left."""

    def __init__(self, row: Row, model: Any) -> None:
        self.row = row
        self.caches = kv.new_caches(model)
        self.held = 0

    @property
    def is_done(self) -> bool:
        return self.held > 0 and len(self.row.tokens) - 1 - self.held < _READ_TOKENS_MAX

    def read_on(self, model: Any, words: int, tokens_max: int) -> int:
        """At most so many more tokens; returns how many."""
        chunk = self.row.tokens[self.held : min(self.held + tokens_max, len(self.row.tokens) - 1)]
        if chunk:
            kv.read_alone(model, self.caches, [min(token, words - 1) for token in chunk])
            # Waited for, so that what it takes is known to be the cost of drafting.
            mx.eval(kv.arrays(self.caches))
        self.held += len(chunk)
        return max(1, len(chunk))


class DraftModel:
    """The source. A row draws its drafts with the same random numbers as its tokens, so that they agree more often.

    It has caches of its own: of a row that joins it reads the prompt first, and what it has read and drafted in vain it
    takes back. While the `trial` is not over, it reads and drafts for one row only.
    """

    name = "draft"

    def __init__(
        self, model: Any, parameter_bytes: int, shape: kv.CacheShape, *, words: int, padding_bytes_max: int
    ) -> None:
        self.parameter_bytes = parameter_bytes
        self.shape = shape
        self.padding_bytes_max = padding_bytes_max
        # Both models may have rows of weights for more words than there are, and not as many.
        self._words = words
        self._model = model
        self.trial = Trial()
        self._token_s = 0.0
        self._rows: list[Row] = []
        self._held: list[int] = []
        self._kv = kv.KVBatch()
        # Tokens that were drafted and read since, [rows][tokens]; not known yet whether they were right.
        self._ahead: list[list[int]] = []
        self._reading: _Reading | None = None
        self._plan: Plan = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the draft model's KV caches."""
        reading = [] if self._reading is None else self._reading.caches
        return self._kv.byte_count + kv.byte_count(reading)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the draft model's batch."""
        longest = self.shape.project(max(self._held, default=0))
        return sum(longest - self.shape.project(held) for held in self._held)

    def project_bytes(self, tokens: int) -> int:
        """The most that its caches of a row take that holds so many tokens."""
        return self.shape.project(tokens + DRAFT_TOKENS_MAX)

    def prepare(self, rows_max: int) -> None:
        """Take some steps: what a device compiles is not what a draft costs."""
        measure_widths(self._model, StepCosts(), rows_max, DRAFT_TOKENS_MAX * rows_max, (2, DRAFT_TOKENS_MAX))

    def follow(self, row: Row) -> Outlook | None:
        """Recent acceptance of the draft model's tokens."""
        if self.trial.begins_again():
            self._reading = None
            self._take_back()
            self._drop(self._rows[1:])
        state = row.draft_state
        if state is None:
            state = row.draft_state = DraftState(self.trial.chance)
        state.ask(self.trial)
        if state.chance < _CHANCE_MIN:
            return None
        most = DRAFT_TOKENS_MAX if self.trial.is_over else _TRIAL_TOKENS_MAX
        return Outlook(state.chance, state.chance, most, self._token_s, lasts=True)

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """Learn what a draft was worth."""
        right = [True] * accepted + [False] * (accepted < proposed)
        for is_right in right:
            self.trial.judged(is_right)
        if row.draft_state is not None:
            row.draft_state.judged(right)

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """A draft for each of the rows whose text it has read; one more row's text is read, or a part of it."""
        self._take_back()
        self.release()
        while self._rows and 2 * self.padding_bytes > self.padding_bytes_max:
            # The longest has to do without, or all others are as long.
            self._drop([self._rows[self._held.index(max(self._held))]])
        if not self.trial.is_over and not any(row in rows for row in self._rows):
            self._drop(self._rows)
        if self.trial.is_over or not self._rows:
            self._read([row for row in rows if row not in self._rows])
        if not self._rows or not max(tokens_max, default=0):
            return [[] for _ in rows]
        started_s = time.perf_counter()
        count = max(tokens_max)
        drafts, is_ready = self._draft(count)
        token_s = (time.perf_counter() - started_s) / count
        self._token_s += 0.1 * (token_s - self._token_s) if self._token_s else token_s
        places = {id(row): place for place, row in enumerate(self._rows)}
        found: list[Sequence[int]] = []
        for row, most in zip(rows, tokens_max, strict=True):
            place = places.get(id(row))
            found.append([] if place is None or not is_ready[place] else drafts[place][:most])
        return found

    def release(self) -> None:
        """Give back the caches of rows that are gone."""
        if self._reading is not None and self._reading.row.gone:
            self._reading = None
        gone = [row for row in self._rows if row.gone]
        if gone:
            self._take_back()
            self._drop(gone)

    def clear(self) -> None:
        """Drop everything."""
        self._rows, self._held, self._kv, self._ahead, self._reading = [], [], kv.KVBatch(), [], None

    def _draft(self, count: int) -> tuple[list[list[int]], list[bool]]:
        """Draft tokens of all rows, and which rows the draft model has read completely."""
        # A row whose tokens are those of the last time, as it is in another batch, has its last one read again.
        again = [max(0, held + 1 - len(row.tokens)) for row, held in zip(self._rows, self._held, strict=True)]
        if any(again):
            self._held = [held - count for held, count in zip(self._held, again, strict=True)]
            self._kv.roll_back(again)
        unread = [row.tokens[held:] for row, held in zip(self._rows, self._held, strict=True)]
        width = min(max(map(len, unread)), _READ_TOKENS_MAX)
        inputs = np.zeros((len(unread), width), np.uint32)
        taken = [min(len(ids), width) for ids in unread]
        for place, ids in enumerate(unread):
            inputs[place, : taken[place]] = np.minimum(ids[:width], self._words - 1)
        tokens = mx.array(inputs)
        logits = self._model(tokens, cache=self._kv.begin_step(tokens))
        last = mx.array([max(0, read - 1) for read in taken])[:, None, None]
        tokens = self._choose(mx.take_along_axis(logits, last, axis=1)[:, 0], 0)
        self._held = [held + read for held, read in zip(self._held, taken, strict=True)]
        self._kv.roll_back([width - read for read in taken])
        made = [tokens]
        # None is started before the last one is built: a model whose layers write in place must not go this way.
        for ahead in range(1, count):
            last_tokens = tokens[:, None]
            logits = self._model(last_tokens, cache=self._kv.begin_step(last_tokens))
            tokens = self._choose(logits[:, -1], ahead)
            made.append(tokens)
        drafts: list[list[int]] = mx.stack(made, axis=1).tolist()  # type: ignore[assignment]
        self._ahead = [drafted[: count - 1] for drafted in drafts]
        return drafts, [held == len(row.tokens) for held, row in zip(self._held, self._rows, strict=True)]

    def _choose(self, logits: mx.array, ahead: int) -> mx.array:
        logits = logits[:, : self._words]
        return choose(logits, self._plan, ahead=ahead).tokens.astype(mx.uint32)

    def _take_back(self) -> None:
        """Keep the draft tokens that were accepted; roll back the others."""
        if not self._ahead or not self._ahead[0]:
            self._ahead = []
            return
        right = [
            _alike(drafted, row.tokens[held : held + len(drafted)])
            for row, held, drafted in zip(self._rows, self._held, self._ahead, strict=True)
        ]
        self._held = [held + count for held, count in zip(self._held, right, strict=True)]
        self._kv.roll_back([len(self._ahead[0]) - count for count in right])
        self._ahead = []

    def _drop(self, leaving: Sequence[Row]) -> None:
        if not leaving:
            return
        gone = {id(row) for row in leaving}
        places = [place for place, row in enumerate(self._rows) if id(row) not in gone]
        places = self._kv.keep_rows(places)
        self._rows = [self._rows[place] for place in places]
        self._held = [self._held[place] for place in places]
        self._follow_change()

    def _read(self, waiting: Sequence[Row]) -> None:
        """A chunk of the texts of rows; one joins when all but its last token was read. To prove itself, one does."""
        left = _READ_TOKENS_MAX
        while left > 0:
            if self._reading is None:
                found = [row for row in waiting if row not in self._rows and self._has_room(row)]
                if not found:
                    break
                self._reading = _Reading(min(found, key=lambda row: len(row.tokens)), self._model)
            reading = self._reading
            left -= reading.read_on(self._model, self._words, left)
            if reading.is_done:
                self._reading = None
                self._kv.join(kv.KVBatch.merge([reading.caches], [reading.held]))
                self._rows.append(reading.row)
                self._held.append(reading.held)
                self._follow_change()
            if not self.trial.is_over:
                break

    def _has_room(self, row: Row) -> bool:
        """Whether the batch, with this row, is not padded too much."""
        lengths = [*self._held, len(row.tokens)]
        padding = max(lengths) * len(lengths) - sum(lengths)
        return len(row.tokens) > 1 and 2 * padding * self.shape.token_bytes <= self.padding_bytes_max

    def _follow_change(self) -> None:
        self._plan = plan_draw(self._rows, self._words) if self._rows else None


def _alike(drafted: Sequence[int], coming: Sequence[int]) -> int:
    """How many tokens of a draft came, up to the first that did not."""
    pairs = zip(drafted, coming, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(coming)))
