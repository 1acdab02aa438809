"""How much prompt one step may read, so that a step is bounded in time and not only in tokens."""

from __future__ import annotations

TOKENS_MIN = 32
"""A smaller chunk costs more than it saves."""
TOKENS_START = 128


class PrefillPace:
    """A chunk size that follows the time steps take: down at once when one is too long, up again while there is room.

    `tokens` is between `TOKENS_MIN` and `tokens_max`. A `target_s` of 0 always allows `tokens_max`. How fast a
    machine reads a model's prompts differs by orders of magnitude and is not known before it has been seen.
    """

    def __init__(self, tokens_max: int, target_s: float) -> None:
        self._tokens_max = tokens_max
        self._target_s = target_s
        self.tokens = min(TOKENS_START, tokens_max) if target_s else tokens_max

    def record(self, tokens_read: int, seconds: float) -> None:
        """A step that read `tokens_read` tokens of prompt took so long in all."""
        if not self._target_s or not tokens_read:
            return
        if seconds > self._target_s:
            # At most a halving a step: one that the system held up must not cost more than a few steps.
            shrunk = int(min(self.tokens, tokens_read) * max(0.5, self._target_s / seconds))
            self.tokens = max(min(TOKENS_MIN, self._tokens_max), shrunk)
        elif seconds < self._target_s / 2 and tokens_read * 2 > self.tokens:
            self.tokens = min(self._tokens_max, self.tokens * 2)
