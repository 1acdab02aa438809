"""Which width makes the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zmqengine.engine.drafts.source import Outlook
from zmqengine.engine.drafts.start_costs import measure_widths
from zmqengine.engine.drafts.step_costs import StepCosts

WIDTHS = (1, 2, 3, 5, 9)
"""Of a step, in tokens a row. Few, as some devices prepare for each shape."""
# Less is not worth a change: figures of steps are not better known.
_GAIN_MIN = 1.05


class WidthPolicy(Protocol):
    """Chooses the width of a step."""

    @property
    def width_max(self) -> int:
        """It is never more."""
        ...

    @property
    def positions_max(self) -> int:
        """A step with drafts never reads more tokens of all rows together."""
        ...

    def prepare(self, model: Any, rows_max: int) -> None:
        """Before the first step, with a model whose caches can go back."""
        ...

    def width(self, rows: int, outlooks: Sequence[Outlook], ahead: int) -> int:
        """The width for a step of `rows` rows, of which some have these outlooks; 1 is for no drafts.

        The drafts will be made when `ahead` more tokens are known.
        """
        ...


class BestWidth:
    """The width with the most expected tokens for what the step costs.

    A step reads at most `positions_max` tokens of all rows, which bounds the memory for its logits.
    """

    width_max = WIDTHS[-1]

    def __init__(self, costs: StepCosts, positions_max: int) -> None:
        self._costs = costs
        self.positions_max = positions_max

    def prepare(self, model: Any, rows_max: int) -> None:
        """Measure what widths cost."""
        measure_widths(model, self._costs, rows_max, self.positions_max, WIDTHS[1:])

    def width(self, rows: int, outlooks: Sequence[Outlook], ahead: int) -> int:
        """The width for this step."""
        single_s = self._costs.single_s(rows)
        # Until a step was timed, drafting is taken to cost nothing.
        token_cost = (
            max((outlook.token_s for outlook in outlooks), default=0.0) / single_s if single_s else 0.0
        )
        best, best_gain = 1, _GAIN_MIN
        for width in WIDTHS[1:]:
            if rows * width > self.positions_max:
                break
            tokens = rows + sum(outlook.accepted(width - 1, ahead) for outlook in outlooks)
            gain = tokens / rows / (self._costs.ratio(rows, width) + token_cost * (width - 1))
            if gain > best_gain:
                best, best_gain = width, gain
        return best
