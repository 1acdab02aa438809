"""The pace of texts beside rows that decode: streams slow down by a share of a step, whatever waits."""

from __future__ import annotations

SHARE = 0.35
"""Time of texts in a step, as a share of the time of one without: streams then keep within 1.5 of it."""
TOKENS_MIN = 4
"""Fewer tokens take as long: that of the calls of a further segment, or of a layer."""
# Time of the least number of tokens at the speed of prefill, as a share of a step without texts. The calls of a
# segment may take more than `SHARE` alone; a GPU reads a hundred tokens in the time of four then.
_LEAST_SHARE = SHARE / 2
TOKENS_START = 16
_EXTRA_MAX = 4.0
# Weight of the present in moving averages.
_NEW = 0.2
_GAIN = 0.2
# Steps of a period without texts, to time these: the steps in which a chunk may show, and one.
_PERIOD, _REST = 256, 4


class TextPace:
    """Tokens of texts in a step, which follow the measured times of steps with and without.

    Where texts are computed by layers they are tokens of one layer. Where the least number takes more than its share,
    texts wait for the steps that pay for them.
    """

    def __init__(self) -> None:
        self._tokens = float(TOKENS_START)
        self._least = float(TOKENS_MIN)
        self._steps = 0
        # In plain steps: time that may be taken, and what the texts of a step take.
        self._credit = 0.0
        self._extra = 0.0
        self.plain_s = 0.0
        """Seconds of a step without texts, 0 while no rows decode or prompts wait, whose pace counts then."""

    def choose(self, tokens_max: int, plain_s: float, tokens_per_s: float = 0.0) -> int:
        """Tokens of texts in this step, at most `tokens_max`.

        `plain_s`: seconds of a step without texts; 0 until one was timed, which waits for that. `tokens_per_s`: the
        speed of prefill where texts are segments; 0 where it is unknown or where they are computed by layers.
        """
        self.plain_s = plain_s
        self._least = max(TOKENS_MIN, _LEAST_SHARE * plain_s * tokens_per_s)
        self._tokens = max(self._tokens, self._least)
        if not plain_s:
            return 0
        self._steps += 1
        self._credit = min(self._credit + SHARE, max(SHARE, self._extra))
        is_least = self._tokens < self._least + 1
        if self._steps % _PERIOD < _REST or (is_least and self._credit < self._extra):
            return 0
        return min(int(self._tokens), tokens_max)

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a step with `tokens` of texts."""
        if not self.plain_s:
            return
        extra = min(max(0.0, seconds / self.plain_s - 1), _EXTRA_MAX)
        self._extra += _NEW * (extra - self._extra)
        self._credit -= extra
        if tokens * 2 < self._tokens and extra < SHARE:
            # Few texts say nothing about many.
            return
        change = min(1.0, max(-1.0, (SHARE - extra) / SHARE))
        self._tokens = max(self._least, self._tokens * (1 + _GAIN * change))
