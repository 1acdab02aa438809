"""The width policy: the width with the highest expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from zmqengine.engine.speculation.source import Outlook
from zmqengine.engine.speculation.start_costs import measure_widths
from zmqengine.engine.speculation.step_costs import StepCosts

WIDTHS = (1, 2, 3, 5, 8)
"""Widths of a step in tokens a row: few, since some devices compile for each; wider blocks count as prompts."""
# Less is not worth a change: figures of steps are not better known. What is less than that is not looked at closely.
_GAIN_MIN, GAIN_NEAR = 1.05, 0.9
# Weight of the time that rows without drafts lose to wider steps, against the tokens that drafting rows gain.
_OTHERS_LOSS = 3


class Choice(NamedTuple):
    """The chosen width, 1 for none, and the expected speed-up of the best width; below `GAIN_NEAR` an upper bound."""

    width: int
    gain: float


class WidthPolicy(Protocol):
    """Chooses the width of a step."""

    @property
    def width_max(self) -> int:
        """It is never more."""
        ...

    @property
    def widths(self) -> Sequence[int]:
        """Widths of verify blocks in rising order: a block takes the smallest that holds its drafts."""
        ...

    @property
    def positions_max(self) -> int:
        """A step with drafts never reads more tokens of all rows together."""
        ...

    def prepare(self, model: Any, rows_max: int) -> None:
        """Before the first step, with a model whose caches can go back."""
        ...

    def is_hopeless(self, rows: int) -> bool:
        """Whether no width can gain with `rows` rows, or costs are unknown. Cheap."""
        ...

    def choose(self, rows: int, outlooks: Sequence[Outlook], ahead: int, *, idle: int = 0) -> Choice:
        """The width for a step of `rows` rows, of which some have these outlooks.

        `ahead`: tokens of the in-flight step that have to be waited for before drafts are made. `idle`: rows that gain
        nothing from a wider step.
        """
        ...


class BestWidth:
    """The width with the most expected tokens for what the step costs, and for the wait where there is one. What it
    costs those who have nothing from it counts three times.

    A step reads at most `positions_max` tokens of all rows, which bounds the memory for its logits.
    """

    width_max = WIDTHS[-1]
    widths = WIDTHS[1:]

    def __init__(self, costs: StepCosts, positions_max: int) -> None:
        self._costs = costs
        self.positions_max = positions_max

    def prepare(self, model: Any, rows_max: int) -> None:
        """Measure what widths cost."""
        measure_widths(model, self._costs, rows_max, self.positions_max, self.widths)

    def is_hopeless(self, rows: int) -> bool:
        """Whether even drafts that are always right lose."""
        costs = self._costs
        return not costs.is_current(rows) or all(
            width < _GAIN_MIN * costs.ratio(rows, width) for width in self._widths(rows)
        )

    def choose(self, rows: int, outlooks: Sequence[Outlook], ahead: int, *, idle: int = 0) -> Choice:
        """The width for this step."""
        costs = self._costs
        single_s = costs.single_s(rows)
        # Until a step was timed, drafting is taken to cost nothing.
        token_cost = (
            max((outlook.token_s for outlook in outlooks), default=0.0) / single_s if single_s else 0.0
        )
        # Whoever stops to run a step ahead has to wait for a step of width 1 once more, when the drafts end.
        wait = costs.wait(rows) if ahead else 0.0
        best = Choice(1, 0.0)
        likely = sum(outlook.first for outlook in outlooks)
        for width in self._widths(rows):
            cost = costs.ratio(rows, width) + wait + token_cost * (width - 1)
            cost = rows * cost + (_OTHERS_LOSS - 1) * idle * (cost - 1)
            # Quickly told: every further token is right where the first is.
            gain = (rows + likely * (width - 1)) / cost
            if gain >= GAIN_NEAR:
                gain = (rows + sum(outlook.accepted(width - 1, ahead) for outlook in outlooks)) / cost
            if gain > best.gain:
                best = Choice(width, gain)
        return best if best.gain > _GAIN_MIN else Choice(1, best.gain)

    def _widths(self, rows: int) -> list[int]:
        return [width for width in self.widths if rows * width <= self.positions_max]
