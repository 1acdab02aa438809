"""What a step takes that reads so many tokens of so many rows, measured as it runs."""

from __future__ import annotations

import statistics
import time
from collections import deque

# The median of the last so many steps counts: a step that the system held up says nothing.
_SAMPLES = 7
# A width that was too slow to be used is known for so many steps, then tried again, then known for twice as many.
_KNOWN_STEPS, _KNOWN_STEPS_MAX = 200, 6400
# What was measured at the start, when other things went on, is believed for so many steps.
_START_STEPS = 1000
# What each further token of a width is taken to cost where nothing is known, in steps of width 1.
_GUESSED = 0.08

Key = tuple[int, int]


class StepCosts:
    """Seconds of a step by rows and width, from steps that were not disturbed.

    Numbers of rows are taken together by powers of two.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, deque[float]] = {}
        self._seconds: dict[Key, float] = {}
        self._known_until: dict[Key, int] = {}
        self._known_for: dict[Key, int] = {}
        self._at_start: dict[Key, float] = {}
        self._steps = 0

    def note(self, rows: int, width: int, seconds: float) -> None:
        """A step of `rows` rows that read `width` tokens of each took so long."""
        key = (rows.bit_length(), width)
        self._steps += 1
        samples = self._samples.setdefault(key, deque(maxlen=_SAMPLES))
        if samples and not self._is_known(key):
            samples.clear()
            self._known_for[key] = min(2 * self._known_for[key], _KNOWN_STEPS_MAX)
        samples.append(seconds)
        self._seconds[key] = statistics.median(samples)
        self._known_until[key] = self._steps + self._known_for.setdefault(key, _KNOWN_STEPS)

    def measured(self, rows: int, width: int, ratio: float) -> None:
        """At the start such a step took `ratio` times what one of width 1 took."""
        self._at_start[rows.bit_length(), width] = ratio

    def ratio(self, rows: int, width: int) -> float:
        """What such a step takes, in steps of width 1 of as many rows."""
        key = (rows.bit_length(), width)
        single = self._seconds.get((key[0], 1))
        if single is not None and self._is_known(key):
            return self._seconds[key] / single
        if self._steps > _START_STEPS:
            return 1 + _GUESSED * (width - 1)
        near = [(abs(bits - key[0]), bits) for bits, measured in self._at_start if measured == width]
        return self._at_start[min(near)[1], width] if near else 1 + _GUESSED * (width - 1)

    def single_s(self, rows: int) -> float | None:
        """Seconds of a step of width 1; None if none was timed yet."""
        return self._seconds.get((rows.bit_length(), 1))

    def _is_known(self, key: Key) -> bool:
        return key in self._seconds and (key[1] == 1 or self._steps <= self._known_until[key])


class StepClock:
    """Times the steps of a batch, from the end of one to the end of the next."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._last_s = 0.0
        self._ignored = 1
        self._drafting_s = 0.0

    def landed(self, rows: int, width: int) -> None:
        """The tokens of a step are there."""
        now_s = time.perf_counter() - self._drafting_s
        self._drafting_s = 0.0
        if self._ignored:
            self._ignored -= 1
        else:
            self._costs.note(rows, width, now_s - self._last_s)
        self._last_s = time.perf_counter()

    def drafted(self, seconds: float) -> None:
        """Sources took so long to draft for the step on its way: that is not what its width costs."""
        self._drafting_s += seconds

    def disturb(self) -> None:
        """The device was given something else to do: the next steps say nothing."""
        self._ignored = 3
