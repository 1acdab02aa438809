"""The protocol of a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from zmqengine.engine.row import Row


class Outlook(NamedTuple):
    """What may be expected of a draft: the chance that its `first` token is accepted and, once one is, that of each
    `further` one; the most tokens it can have, and the seconds that it takes to draft one. One that `lasts` is as good
    when other tokens came meanwhile than were expected."""

    first: float
    further: float
    tokens_max: int
    token_s: float = 0.0
    lasts: bool = False

    def accepted(self, tokens: int, ahead: int = 0) -> float:
        """How many of so many drafted tokens are accepted, on average, when the draft is made `ahead` tokens later."""
        count = min(tokens, self.tokens_max)
        if self.further >= 1:
            return self.first * count
        power: float = 1.0 if self.lasts else self.further**ahead
        return self.first * power * (1 - self.further**count) / (1 - self.further)


class DraftSource(Protocol):
    """Proposes draft tokens for rows whose output is known up to the last token. A draft never changes an output."""

    name: str

    def follow(self, row: Row) -> Outlook | None:
        """Look at the tokens that are new since the last call; what could be drafted now, or None.

        It is asked after every step, so it takes microseconds.
        """
        ...

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """A draft of at most so many tokens for each of the rows, which have just been followed; it may be empty."""
        ...

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """Learn that `accepted` of `proposed` draft tokens were accepted."""
        ...
