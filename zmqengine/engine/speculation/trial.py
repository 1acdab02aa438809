"""Whether a source whose drafts cost something is worth them, found out on one row."""

from __future__ import annotations

CHANCE_AT_FIRST = 0.6

# What that counts for, in tokens, and how many have to be judged.
_EXPECTED_TOKENS = 2
_TOKENS = 6
# How much one more token says once that is known.
_GAIN = 0.01
# One that has failed is tried again after so many questions whether it would draft for a row, and then after twice as
# many.
_PATIENCE, _PATIENCE_MAX = 2048, 1 << 20


class Trial:
    """The `chance` of a drafted token to be accepted, of all rows. It `is_over` when enough of them were judged."""

    def __init__(self) -> None:
        self.chance = CHANCE_AT_FIRST
        self._right = self._judged = 0
        self._idle = 0
        self._patience = _PATIENCE

    @property
    def is_over(self) -> bool:
        """Whether what was seen says what drafts of more rows will be worth."""
        return self._judged >= _TOKENS

    def begins_again(self) -> bool:
        """One more row is asked about. True if it has been a long time since a draft was judged: all is open again."""
        self._idle += 1
        if self._idle <= self._patience:
            return False
        self._idle, self._patience = 0, min(2 * self._patience, _PATIENCE_MAX)
        self._right = self._judged = 0
        self.chance = CHANCE_AT_FIRST
        return True

    def judged(self, is_right: bool) -> None:
        """One more token of a draft was accepted, or not."""
        self._idle = 0
        if is_right:
            self._patience = _PATIENCE
        if self.is_over:
            self.chance += _GAIN * (is_right - self.chance)
            return
        self._right += is_right
        self._judged += 1
        expected = _EXPECTED_TOKENS * CHANCE_AT_FIRST
        self.chance = (self._right + expected) / (self._judged + _EXPECTED_TOKENS)
