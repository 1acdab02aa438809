"""Who drafts in the next step of a batch, and how much."""

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

# Rows that are nowhere near a gain are asked ever more seldom, until so many steps lie in between; fewer as rows come
# and go. A step at which nobody is asked is not timed either: a small model's steps are so short that both can be seen.
_INTERVAL_MAX, _INTERVAL_ANEW = 8, 3
# A row may be so many steps behind for the drafts of others, and such a share of its own steps. Then nobody drafts.
_BEHIND_MAX, _BEHIND_SHARE = 8.0, 0.5


class _Found(NamedTuple):
    """What a source has to say of the row at `place`."""

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
        # Rows are asked every so many steps; and so many steps ago they were.
        self._interval = 1
        self._unasked = 0
        # What they took to answer since a step was last timed.
        self._asked_s = 0.0

    def workspace_bytes(self, rows_max: int, vocab_size: int) -> int:
        """What a step takes for a moment to choose at every place of its windows: logits, and what is made of them."""
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
        """Of windows, in rising order."""
        return self._policy.widths

    def is_due(self, rows: Sequence[Row], *, anew: bool) -> bool:
        """Whether it is worth asking what may come: that takes time as well. Rows are `anew` if some came or went."""
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
        """Whether it is worth waiting for the step on its way to draft after it."""
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
        """A step of these rows is there, and says how many tokens of each draft were accepted.

        `width` is that of its window, 1 for a step that was started ahead, and `WAITED` for one that was not; None for
        one that was started ahead and waited for before the next was started.
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
        """Who drafts, and how much: all of those that have something, or just those whose drafts cost nothing."""
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
