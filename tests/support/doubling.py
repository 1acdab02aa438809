"""A measure of growth: the processor time of a task on an input and on one of twice the size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

FACTOR_MAX = 2.5
"""Twice the time and some noise; what grows with the square takes four times."""
ENOUGH_S = 0.008
"""Processor time below which a measurement says nothing; an input that never takes as long is fast enough."""
TRIES = 3
T = TypeVar("T")


def check_linear(make: Callable[[int], T], work: Callable[[T], object], start: int, most: int) -> None:
    """Assert that `work` on an input of twice the size takes at most `FACTOR_MAX` times as long.

    The size doubles from `start` to `most` until the work takes long enough to be measured. Between two sizes the time
    may take a step, where some limit leads to another way or a cache is full; so two further doublings may show it as
    well. What grows with the square fails in all of them.
    """
    size = start
    while (seconds := _seconds(make, work, size)) < ENOUGH_S:
        if size >= most:
            return
        size = min(2 * size, most)
    factors = []
    for measured in (size, 2 * size, 4 * size):
        if measured > size:
            seconds = _seconds(make, work, measured)
        for _ in range(TRIES):
            factors.append(_seconds(make, work, 2 * measured) / max(seconds, ENOUGH_S))
            if factors[-1] <= FACTOR_MAX:
                return
            seconds = max(seconds, _seconds(make, work, measured))
    raise AssertionError(
        f"from {size}, {2 * size} and {4 * size} on, doubling multiplies the time by {min(factors):.1f}"
    )


def _seconds(make: Callable[[int], T], work: Callable[[T], object], size: int) -> float:
    """Processor time of this thread alone, so that others on the machine do not count."""
    given = make(size)
    started = time.thread_time()
    work(given)
    return time.thread_time() - started
