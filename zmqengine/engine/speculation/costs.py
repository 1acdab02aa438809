"""The cost of a verify block in decode steps, measured once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence


def measured_rows(rows_max: int) -> list[int]:
    """The numbers of rows at which steps and drafts are measured."""
    return sorted({1, min(8, rows_max), rows_max})


class WidthCosts:
    """Seconds of a step by number of rows and width. `seconds[rows][1]` is a plain step in a pipeline of steps.

    A verify block's time includes the wait for the step before it. A number of rows that was not measured uses the next
    larger one, at which a block costs more; beyond the largest the cost is unknown. With `again` they are of an earlier
    start and measured once more, as other programs may have used the device: the least counts.
    """

    def __init__(
        self, seconds: Mapping[int, Mapping[int, float]] | None = None, *, again: bool = False
    ) -> None:
        self.seconds = dict(seconds or {})
        self.again = again

    @classmethod
    def from_text(cls, text: str, *, again: bool = False) -> WidthCosts:
        """The costs of which `as_text` made this; none from another text."""
        try:
            found = json.loads(text)
            seconds = {
                int(rows): {int(width): float(second) for width, second in bucket.items()}
                for rows, bucket in found.items()
            }
        except (ValueError, TypeError, AttributeError):
            return cls()
        return cls(seconds, again=again)

    def as_text(self) -> str:
        """The measured seconds, to be kept for the next start."""
        return json.dumps(self.seconds)

    def has_all(self, widths: Sequence[int], positions_max: int) -> bool:
        """Whether a plain step and blocks of these widths, of up to `positions_max` tokens, were measured at each
        number of rows."""
        return bool(self.seconds) and all(
            width in bucket or rows * width > positions_max
            for rows, bucket in self.seconds.items()
            for width in (1, *widths)
        )

    def step_s(self, rows: int) -> float:
        """Seconds of a plain step; infinite if it was not measured."""
        return self._bucket(rows).get(1, math.inf)

    def ratio(self, rows: int, width: int) -> float:
        """Cost of a verify block relative to a plain step; infinite if it was not measured."""
        bucket = self._bucket(rows)
        return max(1.0, bucket[width] / bucket[1]) if width in bucket and 1 in bucket else math.inf

    def _bucket(self, rows: int) -> Mapping[int, float]:
        return next((self.seconds[count] for count in sorted(self.seconds) if count >= rows), {})
