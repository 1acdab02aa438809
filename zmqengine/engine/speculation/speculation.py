"""Speculative decoding of a batch: which rows draft in the next step, from which source, and how wide."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.allowance import Allowance
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.policy import GAIN_NEAR, Choice, WidthPolicy
from zmqengine.engine.speculation.source import DraftSource, Outlook
from zmqengine.engine.speculation.step_costs import StepClock
from zmqengine.engine.speculation.verify_block import Draft

# Polling interval in steps while no width is near a gain, and its bound after rows came or went. Steps without a poll
# are not timed either: with a small model the cost of both is visible.
_INTERVAL_MAX, _INTERVAL_ANEW = 8, 3
# No row drafts while one is this many steps, plus this share of its own steps, behind because of others' drafts.
_BEHIND_MAX, _BEHIND_SHARE = 8.0, 0.5


class _Found(NamedTuple):
    """The outlook of one source for the row at index `place`."""

    place: int
    source: DraftSource
    outlook: Outlook


class Speculation:
    """Drafts of all `sources` for the rows of a batch: each row gets those of the first source that has some for it.

    `model` is the one of them that holds memory, if any.

    A draft needs the last token of its row, which is unknown while a step is in flight. A batch therefore keeps a step
    in flight while `is_worthwhile` is False, and waits for that step only to draft. An `Allowance` bounds the loss.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource],
        policy: WidthPolicy,
        clock: StepClock,
        model: DraftModel | None = None,
    ) -> None:
        self.model = model
        self.clock = clock
        self.sources = sources
        self._policy = policy
        self._allowance = Allowance()
        # Polling interval in steps, and steps since the last poll.
        self._interval = 1
        self._unasked = 0
        # Seconds spent polling since a step was last timed.
        self._asked_s = 0.0

    def workspace_bytes(self, rows_max: int, vocab_size: int) -> int:
        """Transient bytes of choosing at every position of a verify block: logits and their intermediates."""
        positions = min(self._policy.positions_max, rows_max * self._policy.width_max)
        return 3 * 4 * positions * vocab_size

    def prepare(self, model: Any, rows_max: int) -> None:
        """Before the first step, with a model whose caches can go back."""
        self._policy.prepare(model, rows_max)
        if self.model is not None:
            self.model.prepare(rows_max)

    @property
    def width_max(self) -> int:
        """The most tokens that a row gets in one step."""
        return self._policy.width_max

    @property
    def widths(self) -> Sequence[int]:
        """Widths of verify blocks, in rising order."""
        return self._policy.widths

    def is_due(self, rows: Sequence[Row], *, anew: bool) -> bool:
        """Whether to poll the sources in this step. `anew`: rows came or went since the last one."""
        if anew:
            self._interval = min(self._interval, _INTERVAL_ANEW)
        self._unasked += 1
        if self._unasked < self._interval:
            return False
        self._unasked = 0
        if not rows or not self.clock.costs.is_current(len(rows)):
            # Until it is, each step is timed.
            self._interval = 1
            return False
        self._interval = min(self._interval + 1, _INTERVAL_MAX)
        return self._may_draft(rows)

    def is_worthwhile(self, rows: Sequence[Row]) -> bool:
        """Whether drafting gains enough to wait for the in-flight step."""
        started_s = time.perf_counter()
        _, choice = self._choose(rows, self._outlooks(rows), 1)
        self._asked_s += time.perf_counter() - started_s
        return choice.width > 1

    def propose(self, rows: Sequence[Row]) -> list[Draft | None]:
        """A draft for each row, whose tokens are all known, or None; an empty list if no row drafts."""
        if not self._may_draft(rows):
            return []
        found, choice = self._choose(rows, self._outlooks(rows), 0)
        width = choice.width
        drafts: list[Draft | None] = [None] * len(rows)
        started_s = time.perf_counter()
        for source in self.sources if width > 1 else ():
            asked = [one for one in found if one.source is source]
            if not asked:
                continue
            places = [one.place for one in asked]
            drafting = [rows[place] for place in places]
            counts = [min(width - 1, one.outlook.tokens_max, _room(rows[one.place])) for one in asked]
            for place, tokens in zip(places, source.propose(drafting, counts), strict=True):
                matcher = rows[place].matcher
                allowed = tokens if matcher is None else tokens[: matcher.allowed(tokens)]
                drafts[place] = Draft(allowed, source.name) if len(allowed) else None
        self.clock.drafted(time.perf_counter() - started_s)
        return drafts if any(drafts) else []

    def landed(
        self, rows: Sequence[Row], width: int | None, judged: Sequence[tuple[Row, Draft, int]]
    ) -> None:
        """Account for a landed step: `judged` has the accepted tokens of each draft.

        `width` is that of its verify block, 1 for a step launched before its predecessor was read, `WAITED` for a step
        of width 1 launched after; None for a step whose time is no sample.
        """
        if width == 1 and self._unasked:
            self._allowance.save()
            self.clock.skip()
            return
        drafting_s = self.clock.landed(len(rows), width)
        for row, draft, count in judged:
            for source in self.sources:
                if source.name == draft.source:
                    source.judged(row, len(draft.tokens), count)
        if width is None:
            return
        asked_s, self._asked_s = self._asked_s, 0.0
        costs = self.clock.costs
        single_s = costs.single_s(len(rows)) or math.inf
        if width == 1:
            self._allowance.save(asked_s / single_s)
            return
        steps = costs.ratio(len(rows), width) + drafting_s / single_s
        accepted = {id(row): count for row, _, count in judged}
        self._allowance.bet(1 + sum(accepted.values()) / len(rows), steps)
        for row in rows:
            row.behind += steps - 1 - accepted.get(id(row), 0)

    def _may_draft(self, rows: Sequence[Row]) -> bool:
        """Whether drafts may cost something, could gain something, and no row waits too long for others."""
        return (
            not self._allowance.is_spent
            and not self._policy.is_hopeless(len(rows))
            and all(row.behind <= _BEHIND_MAX + _BEHIND_SHARE * row.sampled for row in rows)
        )

    def _choose(self, rows: Sequence[Row], found: list[_Found], ahead: int) -> tuple[list[_Found], Choice]:
        """The rows to draft for and the width: every source, or only those whose drafts cost nothing."""
        best: tuple[list[_Found], Choice] = [], Choice(1, 0.0)
        free = [one for one in found if not one.outlook.token_s]
        for drafting in [found] if len(free) == len(found) else [found, free]:
            if drafting:
                choice = self._width(rows, drafting, ahead)
                best = max(best, (drafting, choice), key=lambda pair: pair[1].gain)
        self._heed(best[1])
        return best

    def _width(self, rows: Sequence[Row], drafting: Sequence[_Found], ahead: int) -> Choice:
        outlooks = [one.outlook for one in drafting]
        return self._policy.choose(len(rows), outlooks, ahead, idle=_idle(rows, drafting))

    def _heed(self, choice: Choice) -> None:
        """Ask again at the next step, if not much was missing for a gain."""
        if choice.gain >= GAIN_NEAR:
            self._interval = 1

    def _outlooks(self, rows: Sequence[Row]) -> list[_Found]:
        found = []
        for place, row in enumerate(rows):
            if not row.speculate or _room(row) <= 0:
                continue
            for source in self.sources:
                outlook = source.follow(row)
                if outlook is not None:
                    found.append(_Found(place, source, outlook))
                    break
        return found


def _idle(rows: Sequence[Row], drafting: Sequence[_Found]) -> int:
    """How many rows draft nothing, and are not ahead of where they would be without drafts either: others gain at their
    expense."""
    places = {one.place for one in drafting}
    return sum(row.behind > -1 for place, row in enumerate(rows) if place not in places)


def _room(row: Row) -> int:
    """How many tokens a draft may have after those on their way: the one that follows it is an output too."""
    return row.max_tokens - row.sampled - 1
