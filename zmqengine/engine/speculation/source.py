"""The interface of a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqengine.engine.row import Row

RUN_MIN = 4
"""Least length of a run of correct guesses that is not a coincidence: two words of text, or one field of JSON."""
WIDTHS = (4, 8)
"""Widths of verify blocks in tokens a row. Few, since a GPU compiles kernels for each."""
WARM_UP_PROMPT = [1, 2, 3]
"""A prompt of tokens that every vocabulary has."""
# Weight of the last draft in the moving average of the time of a draft token.
_TIME_WEIGHT = 0.1


class DraftSource(Protocol):
    """Proposes draft tokens for rows. A draft never changes an output, since the model verifies it.

    `prior`: the acceptance rate that is assumed before any token was judged.
    """

    name: str
    prior: float

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """Up to `counts[i]` draft tokens after the known tokens of `rows[i]`; empty without a guess."""
        ...

    def release(self) -> None:
        """Drop the state of rows that are gone."""
        ...

    def clear(self) -> None:
        """Drop the state of all rows."""
        ...


class TokenTimes:
    """Seconds of a draft token of some rows at once: a moving average for each of few numbers of rows.

    A number that was not begun uses the next larger one, as `WidthCosts` does, or else the largest.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def begin(self, rows: int) -> None:
        """Let the next measurement of `rows` rows replace the average."""
        self.seconds[rows] = 0.0

    def add(self, rows: int, latest_s: float) -> None:
        """Count one more measurement."""
        bucket = self._bucket(rows)
        average_s = self.seconds.get(bucket, 0.0)
        self.seconds[bucket] = average_s + _TIME_WEIGHT * (latest_s - average_s) if average_s else latest_s

    def of(self, rows: int) -> float:
        """Seconds of a draft token of `rows` rows; 0 where nothing was measured."""
        return self.seconds.get(self._bucket(rows), 0.0)

    def _bucket(self, rows: int) -> int:
        larger = [count for count in self.seconds if count >= rows]
        return min(larger) if larger else max(self.seconds, default=rows)


class ModelSource(DraftSource, Protocol):
    """A source that computes its guesses: a smaller model, or the head of the model itself.

    `times`: of a pass for all rows, measured, which gives a draft token of each or a block. `parameter_bytes`: of
    weights beside the model's. `widths`: of the verify blocks that suit it.
    """

    widths: Sequence[int]
    times: TokenTimes
    parameter_bytes: int

    def passes(self, count: int) -> int:
        """Passes for drafts of `count` tokens."""
        return count

    @property
    def byte_count(self) -> int:
        """Bytes of caches of its own."""
        ...

    def trim(self, empty_bytes_max: int, ahead_bytes: int) -> int:
        """See `ModelRunner.trim`."""
        ...

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of caches of its own for a row of `tokens`."""
        ...

    def prepare(self, rows_max: int) -> None:
        """Warm up by drafts for made-up rows, so that compiled kernels do not count as time of drafting."""
        ...
