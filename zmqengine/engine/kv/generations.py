"""A debug mode that asserts the rules of writing in place; see the theory in `kv`.

With `ZMQENGINE_CHECK_KV=1` in the environment every row and column of a batch has a generation, the number of writes in
place that it has seen. A computation that is built and not started notes the generations of what it will read. When one
of these is written all the same, the write raises AssertionError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CHECKS = os.environ.get("ZMQENGINE_CHECK_KV") == "1"

COPY = "copy"
"""Kind of a computation: a copy of a row for the prefix cache."""

STEP = "step"
"""Kind of a computation: a step of the model for all rows."""


@dataclass(frozen=True)
class _Read:
    """Columns of a row that a computation reads which is built and not started."""

    kind: str
    row: int
    columns: np.ndarray
    generations: np.ndarray


class Generations:
    """Writes in place to the arrays of a batch, the same in all layers."""

    def __init__(self) -> None:
        self._numbers = np.zeros((0, 0), np.int64)
        self._reads: list[_Read] = []

    def built(self, kind: str, row: int, columns: np.ndarray) -> None:
        """A computation was built that reads ascending `columns` of a row."""
        self._fit(row + 1, int(columns[-1]) + 1 if len(columns) else 0)
        self._reads.append(_Read(kind, row, columns, self._numbers[row, columns]))

    def started(self, kind: str) -> None:
        """All computations of this kind were started: the stream keeps them before later writes."""
        self._reads = [read for read in self._reads if read.kind != kind]

    def wrote(self, rows: Sequence[int], start: int, stop: int) -> None:
        """Columns `start` to `stop` of these rows were written. Raises AssertionError if a read waits for them."""
        self._fit(max(rows) + 1, stop)
        self._numbers[list(rows), start:stop] += 1
        for read in self._reads:
            changed = read.columns[self._numbers[read.row, read.columns] != read.generations]
            assert not len(changed), (
                f"row {read.row}, column {changed[0]} of a KV cache was written before a {read.kind} that reads it "
                "was started"
            )

    def replaced(self) -> None:
        """Note new arrays. Reads of the old ones are safe, since these are never written again."""
        self._numbers = np.zeros((0, 0), np.int64)
        self._reads = []

    def _fit(self, rows: int, columns: int) -> None:
        known = self._numbers.shape
        if rows > known[0] or columns > known[1]:
            more = ((0, max(0, rows - known[0])), (0, max(0, columns - known[1])))
            self._numbers = np.pad(self._numbers, more)
