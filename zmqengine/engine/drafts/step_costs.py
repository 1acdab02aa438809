"""What a step takes that reads so many tokens of so many rows, measured as it runs."""

from __future__ import annotations

import time
from collections import deque

WAITED = 0
"""Instead of a width: a step of width 1 that was started when the tokens of the step before were known. One that was
started ahead of them has the width 1."""
# The third of the last so many steps counts, by time: a step that the system held up says nothing.
_SAMPLES, _PLACE = 7, 2
# A step of width 1 is known when it was timed so often, and was timed lately.
_SAMPLES_MIN = 3
_SINGLE_KNOWN_STEPS = 512
# A width that was too slow to be used is known for so many steps, then tried again, then known for twice as many.
_KNOWN_STEPS, _KNOWN_STEPS_MAX = 256, 8192
# What is taken where nothing is known, in steps of width 1: for each further token of a width, and for waiting.
_GUESSED = 0.08
_GUESSED_WAIT = 0.3

Key = tuple[int, int]


class StepCosts:
    """Seconds of a step by rows and width, from steps that were not disturbed.

    More than eight rows are taken together by fours, more than 32 by sixteens.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, deque[float]] = {}
        self._seconds: dict[Key, float] = {}
        self._noted_at: dict[Key, int] = {}
        self._known_for: dict[Key, int] = {}
        self._at_start: dict[Key, float] = {}
        self._steps = 0

    def note(self, rows: int, width: int, seconds: float) -> None:
        """A step of `rows` rows that read `width` tokens of each, or was `WAITED` for, took so long."""
        key = (_group(rows), width)
        self._steps += 1
        samples = self._samples.setdefault(key, deque(maxlen=_SAMPLES))
        if samples and not self._is_known(key):
            samples.clear()
            self._known_for[key] = min(2 * self._known_for.get(key, _KNOWN_STEPS), _KNOWN_STEPS_MAX)
        samples.append(seconds)
        self._seconds[key] = sorted(samples)[min(_PLACE, len(samples) // 2)]
        self._noted_at[key] = self._steps

    def measured(self, rows: int, width: int, ratio: float) -> None:
        """At the start such a step took `ratio` times what one of width 1 took."""
        self._at_start[_group(rows), width] = ratio

    def is_current(self, rows: int) -> bool:
        """Whether enough steps of so many rows and width 1 have been timed lately to compare others with them."""
        key = (_group(rows), 1)
        return len(self._samples.get(key, ())) >= _SAMPLES_MIN and self._is_known(key)

    def ratio(self, rows: int, width: int) -> float:
        """What such a step takes, in steps of width 1 of as many rows.

        It is not less than one, nor more than it takes to make its tokens one by one after a wait: what says otherwise
        was held up by something else.
        """
        return min(max(1.0, self._measured_ratio(rows, width)), 1.0 + max(1, width))

    def _measured_ratio(self, rows: int, width: int) -> float:
        group = _group(rows)
        single = self._seconds.get((group, 1))
        if single is not None and self._is_known((group, width)):
            return self._seconds[group, width] / single
        near = [(abs(other - group), other) for other, measured in self._at_start if measured == width]
        if near:
            return self._at_start[min(near)[1], width]
        return 1 + (_GUESSED_WAIT if width == WAITED else _GUESSED * (width - 1))

    def single_s(self, rows: int) -> float | None:
        """Seconds of a step of width 1; None if none was timed yet."""
        return self._seconds.get((_group(rows), 1))

    def _is_known(self, key: Key) -> bool:
        if key not in self._seconds:
            return False
        # Waiting is a part of every other bet: it is timed whenever one ends.
        lasts = _SINGLE_KNOWN_STEPS if key[1] in (1, WAITED) else self._known_for.get(key, _KNOWN_STEPS)
        return self._steps <= self._noted_at[key] + lasts


class StepClock:
    """Times the steps of a batch, from the end of one to the end of the next."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._last_s = 0.0
        self._ignored = 1
        self._drafting_s = 0.0

    def landed(self, rows: int, width: int | None) -> float:
        """The tokens of a step are there; None is for one whose time says nothing.

        Returns how many seconds sources took to draft for it.
        """
        now_s = time.perf_counter()
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        if self._ignored:
            self._ignored -= 1
        elif width is not None:
            self.costs.note(rows, width, now_s - drafting_s - self._last_s)
        self._last_s = now_s
        return drafting_s

    def drafted(self, seconds: float) -> None:
        """Sources took so long to draft for the coming step: that is not what its width costs."""
        self._drafting_s += seconds

    def disturb(self) -> None:
        """The device was given something else to do: the next steps say nothing."""
        self._ignored = 3


def _group(rows: int) -> int:
    if rows <= 8:
        return rows
    size = 4 if rows <= 32 else 16
    return -(-rows // size) * size
