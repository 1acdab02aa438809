"""Caches of preempted rows, kept until the rows resume."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqengine.engine.row import Row, SampledToken


@dataclass(frozen=True, eq=False)
class ParkedRow:
    """The cache of the first `computed_tokens` of a preempted row, and its next token if it was sampled already."""

    row: Row
    cache: Any
    computed_tokens: int
    sampled: SampledToken | None
    bytes: int

    @classmethod
    def of(cls, row: Row, sampled: SampledToken | None = None) -> ParkedRow:
        """Park `row` with its cache."""
        row.cache.park()
        return cls(row, row.cache, row.computed_tokens, sampled, row.cache.bytes)

    @property
    def is_finite(self) -> bool:
        """Whether a finite logit was computed from the cache."""
        return self.sampled is not None or self.row.is_finite

    def drop(self) -> None:
        """Free the cache."""
        self.cache.close(is_finite=self.is_finite)

    @property
    def reusable(self) -> int:
        """Tokens that need no prefill when the row resumes."""
        return min(self.computed_tokens, len(self.row.tokens) - 1)

    def is_same(self, row: Row) -> bool:
        """Whether `row` resumes this one: everything that determines its next token is equal."""
        ours = self.row
        return (
            len(ours.tokens) == len(row.ids)
            and ours.prompt_tokens == row.prompt_tokens
            and ours.key == row.key
            and ours.scope == row.scope
            and ours.grammar is row.grammar
            and ours.thinking == row.thinking
            and ours.sampling == row.sampling
            and ours.logprobs == row.logprobs
            and np.array_equal(ours.named(len(ours.tokens)), row.ids)
        )


class ParkedRows:
    """Parked rows by id, the one parked longest ago first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, ParkedRow] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, parked: ParkedRow) -> None:
        self._rows[parked.row.id] = parked
        self.bytes += parked.bytes

    def take(self, row: Row) -> ParkedRow | None:
        """Remove and return the parked row that `row` resumes."""
        found = next((parked for parked in self._rows.values() if parked.is_same(row)), None)
        return None if found is None else self.pop(found.row.id)

    def pop(self, row_id: int) -> ParkedRow | None:
        """Remove and return the row that had this id."""
        parked = self._rows.pop(row_id, None)
        self.bytes -= parked.bytes if parked is not None else 0
        return parked

    def trim(self, bytes_max: int) -> None:
        """Drop the oldest rows until the others fit in `bytes_max`."""
        while self._rows and self.bytes > bytes_max:
            parked = self.pop(next(iter(self._rows)))
            assert parked is not None
            parked.drop()

    def clear(self) -> None:
        """Forget everything; the caches of all rows are gone."""
        self._rows.clear()
        self.bytes = 0
