"""The interface of a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqengine.engine.row import Row

RUN_MIN = 4
"""Least length of a run of correct guesses that is not a coincidence: two words of text, or one field of JSON."""


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
