"""Budget of speculation: it may never lose much more than it has gained."""

from __future__ import annotations

# Of each step without drafts, so much may be lost to drafts later: where nothing ever repeats, that is all they cost.
_SHARE = 0.01
# What may be lost before anything was gained.
_AT_FIRST = 8.0
# What is kept of gains, and of shares that nobody used: a text that has repeated itself may stop doing so.
_KEPT_MAX = 32.0
# What one bet may lose: a source or a shape that is new to the device takes long once.
_BET_MAX = 8.0


class Allowance:
    """Counts in steps of width 1: a step with drafts gains the tokens that it makes of a row, and costs what it takes.

    While the allowance `is_spent`, nobody drafts.
    """

    def __init__(self) -> None:
        self._left = _AT_FIRST

    @property
    def is_spent(self) -> bool:
        """Whether drafts have lost what they may."""
        return self._left <= 0

    def save(self, asking: float = 0.0) -> None:
        """A step was made without drafts, ahead of the tokens of the step before. To ask for drafts took so long."""
        self._left = min(self._left + _SHARE, max(self._left, _AT_FIRST)) - min(asking, _BET_MAX)

    def bet(self, tokens: float, steps: float) -> None:
        """A step that drafts had a part in made so many tokens of a row, and took so long."""
        self._left = min(self._left + max(tokens - steps, -_BET_MAX), _KEPT_MAX)
