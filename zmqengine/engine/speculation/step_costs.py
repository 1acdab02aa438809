"""Measured cost of a step by number of rows and width, in seconds and relative to a step of width 1."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

WAITED = 0
"""Instead of a width: a step of width 1 that was started when the tokens of the step before were known. One that was
started ahead of them has the width 1."""


# The estimate is the third shortest of the last seven samples: a step that the system delayed is an outlier.
_SAMPLES, _PLACE = 7, 2
# A step of width 1 is known when it was timed so often. If none was timed in so many steps, drafts pause until one is,
# or for so many steps as are waited for one that nothing disturbs.
_SAMPLES_MIN = 3
_SINGLE_KNOWN_STEPS = 512
_PATIENCE_STEPS = 24
# A measurement from up to 1.5 times fewer rows is reused.
_LESS = 1.5
# A width that was too slow to be used is known for so many steps, then tried again, then known for twice as many.
_KNOWN_STEPS, _KNOWN_STEPS_MAX = 256, 8192
# What is taken where nothing is known, in steps of width 1: for each further token of a width, and for waiting.
_GUESSED = 0.08
_GUESSED_WAIT = 0.3
# Gain of the moving average of the length of runs of consecutive verify blocks, and its cap.
_RUN_GAIN, _RUN_MAX = 0.25, 16

Key = tuple[int, int]


class StepCosts:
    """Seconds of a step by rows and width, from steps that were not disturbed.

    More than eight rows are taken together by fours, more than 32 by sixteens. What nobody has timed for so many rows
    is taken to be as for the number next to it, as rows come and go faster than steps are timed.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, deque[float]] = {}
        self._seconds: dict[Key, float] = {}
        self._noted_at: dict[Key, int] = {}
        self._known_for: dict[Key, int] = {}
        # Row groups in which a width was timed.
        self._groups: dict[int, set[int]] = {}
        # Measured at the start: width -> rows -> time relative to width 1; and rows -> seconds of width 1.
        self._at_start: dict[int, dict[int, float]] = {}
        self._singles_at_start: dict[int, float] = {}
        # Cached results of `ratio`, cleared by every sample.
        self._ratios: dict[Key, float] = {}
        self._steps = 0
        # Step number of the last valid sample of width 1, and steps since a new one became due.
        self._single_at = 0
        self._overdue = 0
        # Consecutive steps without a valid sample.
        self._untimed = 0
        # Consecutive verify blocks since the last step of width 1, and their average run length.
        self._windows = 0
        self._run = 1.0

    def note(self, rows: int, width: int, seconds: float) -> None:
        """A step of `rows` rows that read `width` tokens of each, or was `WAITED` for, took so long."""
        key = (_group(rows), width)
        self._ratios.clear()
        self._steps += 1
        self._untimed = 0
        if width == 1:
            self._single_at, self._overdue = self._steps, 0
        samples = self._samples.setdefault(key, deque(maxlen=_SAMPLES))
        if samples and not self._is_known(key):
            samples.clear()
            self._known_for[key] = min(2 * self._known_for.get(key, _KNOWN_STEPS), _KNOWN_STEPS_MAX)
        samples.append(seconds)
        self._groups.setdefault(width, set()).add(key[0])
        self._seconds[key] = sorted(samples)[min(_PLACE, len(samples) // 2)]
        self._noted_at[key] = self._steps

    def passed(self, width: int | None) -> None:
        """A step is there, whether its time says something or not; None for one that began before others were known."""
        self._untimed += 1
        if width is not None and width > 1:
            self._windows += 1
        elif width is not None and self._windows:
            self._run += _RUN_GAIN * (min(self._windows, _RUN_MAX) - self._run)
            self._windows = 0
        if self._steps > self._single_at + _SINGLE_KNOWN_STEPS:
            self._overdue += 1
            if self._overdue >= _PATIENCE_STEPS:
                self._single_at, self._overdue = self._steps, 0

    def measured(self, rows: int, seconds: Mapping[int, float]) -> None:
        """At the start, steps of so many rows took so long, by width; that of width 1 is among them."""
        self._ratios.clear()
        self._singles_at_start[_group(rows)] = seconds[1]
        for width, its_s in seconds.items():
            self._at_start.setdefault(width, {})[_group(rows)] = its_s / seconds[1]

    def is_current(self, rows: int) -> bool:
        """Whether enough is known of steps of width 1 to compare others with them. Now and then they are timed again.

        What is known of more rows, or a few less, will do. So does what was measured at the start, where every step is
        disturbed by others.
        """
        if self._steps > self._single_at + _SINGLE_KNOWN_STEPS:
            return False
        group = _group(rows)
        if self._is_timed(group, 1) or any(
            self._is_timed(other, 1) for other in self._groups.get(1, ()) if _LESS * other >= group
        ):
            return True
        return self._untimed >= _PATIENCE_STEPS and self._near(rows, 1) is not None

    def ratio(self, rows: int, width: int) -> float:
        """What such a step takes, in steps of width 1 of as many rows.

        It is not less than one, nor more than it takes to make its tokens one by one after a wait: what says otherwise
        was held up by something else.
        """
        ratio = self._ratios.get((rows, width))
        if ratio is None:
            ratio = min(max(1.0, self._measured_ratio(rows, width)), 1.0 + max(1, width))
            self._ratios[rows, width] = ratio
        return ratio

    def wait(self, rows: int) -> float:
        """What it takes to stop running a step ahead, in steps, for each of the windows that follow each other then."""
        return (self.ratio(rows, WAITED) - 1) / self._run

    def _measured_ratio(self, rows: int, width: int) -> float:
        near = self._near(rows, width)
        if near is not None:
            return near
        return 1 + (_GUESSED_WAIT if width == WAITED else _GUESSED * (width - 1))

    def _near(self, rows: int, width: int) -> float | None:
        """The ratio of this width for the number of rows that is nearest, of those it is known of."""
        group = _group(rows)
        if self._is_timed(group, width):
            return self._seconds[group, width] / self._seconds[group, 1]
        # Of two that are as near, the one of more rows: there, a width costs more.
        found = [
            (abs(other - group), -other, ratio) for other, ratio in self._at_start.get(width, {}).items()
        ]
        found += [
            (abs(other - group), -other, self._seconds[other, width] / self._seconds[other, 1])
            for other in self._groups.get(width, ())
            if self._is_timed(other, width)
        ]
        return min(found)[2] if found else None

    def single_s(self, rows: int) -> float | None:
        """Seconds of a step of width 1, of the nearest number of rows; None if none was timed yet."""
        group = _group(rows)
        if (group, 1) in self._seconds:
            return self._seconds[group, 1]
        near = [(abs(other - group), self._seconds[other, 1]) for other in self._groups.get(1, ())]
        near += [(abs(other - group), seconds) for other, seconds in self._singles_at_start.items()]
        return min(near)[1] if near else None

    def _is_timed(self, group: int, width: int) -> bool:
        if len(self._samples.get((group, 1), ())) < _SAMPLES_MIN:
            return False
        is_fresh = self._steps <= self._noted_at[group, 1] + _KNOWN_STEPS_MAX
        return is_fresh and self._is_known((group, width))

    def _is_known(self, key: Key) -> bool:
        if key not in self._seconds:
            return False
        if key[1] in (1, WAITED):
            # Waiting is a part of every other bet: it is timed whenever one ends.
            return True
        return self._steps <= self._noted_at[key] + self._known_for.get(key, _KNOWN_STEPS)


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
        self.costs.passed(width)
        if self._ignored:
            self._ignored -= 1
        elif width is not None:
            self.costs.note(rows, width, now_s - drafting_s - self._last_s)
        self._last_s = now_s
        return drafting_s

    def skip(self) -> None:
        """The tokens of a step are there whose time nobody wants to know."""
        self._ignored = max(0, self._ignored - 1)
        self._drafting_s = 0.0
        self._last_s = time.perf_counter()

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
