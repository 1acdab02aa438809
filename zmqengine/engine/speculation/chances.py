"""How often what a text foretells comes true."""

from __future__ import annotations

RUN_MIN = 4
"""Length of a correct run that is no coincidence."""
CHANCE_MAX = 0.98
"""Nothing is sure."""
DRAFT_TOKENS_MAX = 64
"""Draft tokens of one proposal at most."""

# How much one more token says about the chances of a row, and of rows to come.
_ROW_GAIN = 0.2
_SHARED_GAIN = 0.02


class Chances:
    """How often the first token after a match is right, and each further one. A row starts with those of all rows."""

    __slots__ = ("_shared", "first", "further")

    def __init__(self, first: float, further: float, shared: Chances | None = None) -> None:
        self.first = first
        self.further = further
        self._shared = shared

    def of_row(self) -> Chances:
        """Probabilities of a new row; what it learns is learnt for all rows as well."""
        return Chances(self.first, self.further, self)

    def learn(self, is_right: bool, *, is_first: bool) -> None:
        """One more token was foretold, rightly or wrongly."""
        for chances, gain in ((self, _ROW_GAIN), (self._shared, _SHARED_GAIN)):
            if chances is None:
                continue
            if is_first:
                chances.first += gain * (is_right - chances.first)
            else:
                chances.further += gain * (is_right - chances.further)
