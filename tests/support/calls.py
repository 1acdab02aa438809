"""Counts of function calls, which hold on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def profiled(note: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Call `note` for each call and return of this thread, as `sys.setprofile` does."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def calls_of(work: Callable[[], T]) -> tuple[T, int]:
    """The result of `work`, and the number of Python and C functions that it calls."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with profiled(count):
        result = work()
        made = calls
    return result, made
