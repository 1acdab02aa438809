"""The cost of a verify block in decode steps, measured once."""

from __future__ import annotations

import math
from collections.abc import Mapping


class WidthCosts:
    """Seconds of a step by number of rows and width. `seconds[rows][1]` is a plain step in a pipeline of steps.

    A verify block's time includes the wait for the step before it. A number of rows that was not measured uses the next
    larger one, at which a block costs more; beyond the largest the cost is unknown.
    """

    def __init__(self, seconds: Mapping[int, Mapping[int, float]] | None = None) -> None:
        self.seconds = dict(seconds or {})

    def step_s(self, rows: int) -> float:
        """Seconds of a plain step; infinite if it was not measured."""
        return self._bucket(rows).get(1, math.inf)

    def ratio(self, rows: int, width: int) -> float:
        """Cost of a verify block relative to a plain step; infinite if it was not measured."""
        bucket = self._bucket(rows)
        return max(1.0, bucket[width] / bucket[1]) if width in bucket and 1 in bucket else math.inf

    def _bucket(self, rows: int) -> Mapping[int, float]:
        return next((self.seconds[count] for count in sorted(self.seconds) if count >= rows), {})
