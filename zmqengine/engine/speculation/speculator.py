"""Speculative decoding of a batch: whether the next step verifies draft tokens, of which rows, and how many.

Theory of operation. Each row has the first source that has a guess of its next tokens. A source's acceptance rate is a
moving average for each row, which begins with that of all rows. The rates give the expected number of tokens of a
verify block, `WidthCosts` its cost in plain steps; a block is planned where it gains 5 % or more.

The guess of a lookup (n-grams, a prediction, a grammar) is compared with the tokens sampled later, verified or not, so
its rate is learnt without a verify block. A draft model has to be tried: on one row, in the smallest blocks, until some
tokens were judged. Where it gains nothing, it is tried again after a number of polls that doubles.

A draft follows the last token of its row, which is unknown while a step is in flight. `is_worth_waiting` polls the
lookups beside that step and says whether to land it first; polls without a prospect of gain become rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.acceptance import Acceptance
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.source import WIDTHS, DraftSource, ModelSource
from zmqengine.engine.speculation.verify_block import Draft, VerifyBlock

# Least gain of a verify block: the precision of measured costs.
_GAIN_MIN = 1.05
# From this gain on, a few more accepted tokens would justify a block: the next step polls again.
_GAIN_NEAR = 0.9
# Steps from one poll to the next, by the number of polls in a row without a prospect of gain: a grammar's forced runs
# stand a few tokens apart.
_POLL_STEPS = (1, 1, 1, 1, 2, 4, 8)
# Weights of one more judged token in the acceptance rate of a row and in that of all rows.
_ROW_WEIGHT, _SHARED_WEIGHT = 0.2, 0.02
# Judged tokens after which a draft model's rate counts.
_TRIAL_TOKENS = 6
_RETRY_POLLS, _RETRY_POLLS_MAX = 64, 1 << 16
# No verify block while a row is behind by more than this many plain steps and this share of its own tokens, because of
# blocks in which other rows gained more.
_BEHIND_STEPS, _BEHIND_SHARE = 8.0, 0.5


class Guess(NamedTuple):
    """The next tokens of the row at `row_index`, as a lookup guesses them."""

    row_index: int
    source: DraftSource
    tokens: Sequence[int]


class Choice(NamedTuple):
    """A width (1: a plain step), the best width's expected gain, and the indices of rows for which the draft model
    drafts."""

    gain: float
    width: int
    drafting: Sequence[int]


class _RowState:
    """Speculation's state of one row.

    `rates`: acceptance by source. `guess`: a guess made after `guess_at` tokens that was not judged yet. `behind`:
    plain steps that the row lost to verify blocks (negative: gained).
    """

    __slots__ = ("behind", "guess", "guess_at", "rates")

    def __init__(self) -> None:
        self.behind = 0.0
        self.guess: Guess | None = None
        self.guess_at = 0
        self.rates: dict[str, Acceptance] = {}


class Speculator:
    """Plans the verify blocks of a batch and learns from them. A row asks `lookups` in this order, and then `model`.

    A block has at most `positions_max` tokens of all rows, which bounds the memory of its logits.
    """

    def __init__(
        self,
        lookups: Sequence[DraftSource],
        costs: WidthCosts,
        *,
        model: ModelSource | None = None,
        positions_max: int = 1 << 20,
    ) -> None:
        self.lookups = lookups
        self.costs = costs
        self.model = model
        self.widths = WIDTHS if model is None else model.widths
        self.positions_max = positions_max
        self._rows: dict[Row, _RowState] = {}
        self._shared: dict[str, Acceptance] = {}
        self._gainless_polls = 0
        self._unpolled_steps = 0
        # The row that the draft model is tried on, polls since its tokens were judged, and polls until the next trial.
        self._tried: Row | None = None
        self._idle_polls = 0
        self._retry_polls = _RETRY_POLLS

    @property
    def has_all_costs(self) -> bool:
        """Whether the cost of every verify block was measured."""
        return self.costs.has_all(self.widths, self.positions_max)

    def workspace_bytes(self, rows_max: int, vocab_size: int) -> int:
        """Transient bytes of sampling at every position of a verify block: logits and their intermediates."""
        positions = min(self.positions_max, rows_max * self.widths[-1])
        return 3 * 4 * positions * vocab_size

    def is_worth_waiting(self, rows: Sequence[Row], *, changed: bool, in_flight: int = 1) -> bool:
        """Whether a verify block would gain enough to land the in-flight step before the next one starts.

        `changed`: rows joined or left since the last call. `in_flight`: tokens of each row in flight.
        """
        if changed:
            self._gainless_polls = min(self._gainless_polls, 3)
        self._unpolled_steps += 1
        if self._unpolled_steps < _POLL_STEPS[self._gainless_polls]:
            return False
        self._unpolled_steps = 0
        choice = self.choose(rows, *self._guess(rows), in_flight=in_flight)
        gainless = 0 if choice.gain >= _GAIN_NEAR else self._gainless_polls + 1
        self._gainless_polls = min(gainless, len(_POLL_STEPS) - 1)
        return choice.width > 1

    def plan(self, rows: Sequence[Row]) -> VerifyBlock | None:
        """The verify block of the next step of `rows`, whose tokens are all known; None for a plain step."""
        guesses, silent = self._guess(rows)
        choice = self.choose(rows, guesses, silent)
        if choice.width == 1:
            return None
        drafts: list[Draft | None] = [None] * len(rows)
        for index, source, guess in guesses + self._ask_model(rows, choice):
            row = rows[index]
            tokens = guess[: min(choice.width, row.max_tokens - row.sampled) - 1]
            allowed = tokens if row.matcher is None else tokens[: row.matcher.allowed(tokens)]
            if len(allowed):
                drafts[index] = Draft(allowed, source.name)
        return VerifyBlock.of(drafts, self.widths) if any(drafts) else None

    def commit(self, rows: Sequence[Row], block: VerifyBlock, accepted: Sequence[int]) -> None:
        """Learn from a landed verify block of `rows`: `accepted[i]` draft tokens of row i were accepted."""
        cost = self.costs.ratio(len(rows), block.width)
        for row, draft, count in zip(rows, block.drafts, accepted, strict=True):
            state = self._rows.setdefault(row, _RowState())
            state.behind += cost - 1 - count
            if draft is not None:
                state.guess = None
                self._judge(state, draft.source, count, rejected=count < len(draft.tokens))

    def release(self) -> None:
        """Drop the state of rows that are gone."""
        self._rows = {row: state for row, state in self._rows.items() if not row.gone}
        for source in self._sources():
            source.release()

    def clear(self) -> None:
        """Drop the state of all rows."""
        self._rows.clear()
        for source in self._sources():
            source.clear()

    def choose(
        self, rows: Sequence[Row], guesses: Sequence[Guess], silent: Sequence[int], in_flight: int = 0
    ) -> Choice:
        """The width with the highest expected gain; 1 where none gains enough.

        `silent`: indices of rows without a guess. `in_flight`: tokens between the known ones and the next step's.
        """
        choices = [
            Choice(self._gain(rows, guesses, drafting, width, in_flight), width, drafting)
            for width in self.widths
            if len(rows) * width <= self.positions_max
            for drafting in ([], silent)
            if guesses or drafting
        ]
        best = max(choices, default=Choice(0.0, 1, []))
        return best if best.gain >= _GAIN_MIN else Choice(best.gain, 1, [])

    def _gain(
        self,
        rows: Sequence[Row],
        guesses: Sequence[Guess],
        drafting: Sequence[int],
        width: int,
        in_flight: int,
    ) -> float:
        """Expected tokens of a verify block relative to those of plain steps that take as long."""
        tokens, cost = float(len(rows)), self.costs.ratio(len(rows), width)
        for guess in guesses:
            rate = self._rate(rows[guess.row_index], guess.source)
            # The guess begins with the token in flight, and is usable if that one is right.
            tokens += rate.rate**in_flight * rate.expected(min(width - 1, len(guess.tokens) - in_flight))
        if drafting and self.model is not None:
            tokens += sum(self._rate(rows[index], self.model).expected(width - 1) for index in drafting)
            passes = self.model.passes(width - 1)
            cost += passes * self.model.times.of(len(drafting)) / self.costs.step_s(len(rows))
        return tokens / (len(rows) * cost)

    def _guess(self, rows: Sequence[Row]) -> tuple[list[Guess], list[int]]:
        """The first guess of a lookup for each row, and the indices of rows for which only the draft model may draft.

        Judges the guesses of the last poll by the tokens sampled since. No row may draft while one is too far behind.
        """
        asked: list[int] = []
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                if state.behind > _BEHIND_STEPS + _BEHIND_SHARE * row.sampled:
                    return [], []
                if state.guess is not None:
                    self._judge_guess(row, state, state.guess)
            if row.speculate and row.max_tokens - row.sampled > 1:
                asked.append(index)
        guesses: list[Guess] = []
        for lookup in self.lookups:
            found = lookup.draft([rows[index] for index in asked], [self.widths[-1]] * len(asked))
            for index, tokens in zip(asked, found, strict=True):
                if len(tokens):
                    guesses.append(Guess(index, lookup, tokens))
            if guesses:
                asked = [index for index, tokens in zip(asked, found, strict=True) if not len(tokens)]
        for guess in guesses:
            row = rows[guess.row_index]
            state = self._rows.setdefault(row, _RowState())
            state.guess, state.guess_at = guess, len(row.tokens)
        return guesses, self._silent(asked)

    def _silent(self, asked: list[int]) -> list[int]:
        """The rows for which the draft model may draft; empty without one. Begins a new trial where it is due."""
        if self.model is None or not asked:
            return []
        self._idle_polls += 1
        if self._idle_polls > self._retry_polls:
            self._idle_polls, self._retry_polls = 0, min(2 * self._retry_polls, _RETRY_POLLS_MAX)
            self._shared.pop(self.model.name, None)
            for state in self._rows.values():
                state.rates.pop(self.model.name, None)
            self.model.clear()
        return asked

    def _ask_model(self, rows: Sequence[Row], choice: Choice) -> list[Guess]:
        """Draft tokens of the draft model; during its trial a few, for one row."""
        model, indices, width = self.model, choice.drafting, choice.width
        if model is None or not indices:
            return []
        self._idle_polls = 0
        if self._shared_rate(model.name).judged < _TRIAL_TOKENS:
            indices = [index for index in indices if rows[index] is self._tried] or indices[:1]
            self._tried = rows[indices[0]]
            width = self.widths[0]
        counts = [min(width, rows[index].max_tokens - rows[index].sampled) - 1 for index in indices]
        found = model.draft([rows[index] for index in indices], counts)
        return [Guess(index, model, tokens) for index, tokens in zip(indices, found, strict=True)]

    def _judge_guess(self, row: Row, state: _RowState, guess: Guess) -> None:
        """Compare a guess for a row with the tokens sampled since."""
        came = row.tokens[state.guess_at : state.guess_at + len(guess.tokens)]
        right = 0
        while right < len(came) and came[right] == guess.tokens[right]:
            right += 1
        self._judge(state, guess.source.name, right, rejected=right < len(came))
        state.guess = None

    def _judge(self, state: _RowState, source: str, accepted: int, *, rejected: bool) -> None:
        shared = self._shared_rate(source)
        own = state.rates.get(source)
        if own is None:
            own = state.rates[source] = Acceptance(shared.rate, _ROW_WEIGHT)
        for rate in (own, shared):
            rate.judge(accepted, rejected=rejected)
        if accepted and self.model is not None and source == self.model.name:
            self._retry_polls = _RETRY_POLLS

    def _rate(self, row: Row, source: DraftSource) -> Acceptance:
        """The acceptance of a source's tokens for a row: that of all rows until some of its own were judged."""
        state = self._rows.get(row)
        own = None if state is None else state.rates.get(source.name)
        return self._shared_rate(source.name) if own is None else own

    def _shared_rate(self, source: str) -> Acceptance:
        """The acceptance of a source's tokens for all rows."""
        if source not in self._shared:
            prior = next(each.prior for each in self._sources() if each.name == source)
            self._shared[source] = Acceptance(prior, _SHARED_WEIGHT)
        return self._shared[source]

    def _sources(self) -> list[DraftSource]:
        return [*self.lookups, *([] if self.model is None else [self.model])]
