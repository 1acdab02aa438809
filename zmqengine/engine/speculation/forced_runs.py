"""Drafts of a grammar: what it leaves no choice about, as the name of a field that must come."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.source import Outlook

# Forced are characters, and the model may cut them into other tokens.
_CHANCE_AT_FIRST = 0.8
_GAIN = 0.05
# Of the tokens of an output, how many have something forced behind them, and how much it is on average.
_OFTEN_AT_FIRST, _LENGTH_AT_FIRST = 0.2, 3.0


class ForcedRuns:
    """The source. It has something to say only of rows with a grammar."""

    name = "grammar"

    def __init__(self) -> None:
        self._chance = _CHANCE_AT_FIRST
        self._often = _OFTEN_AT_FIRST
        self._length = _LENGTH_AT_FIRST

    def follow(self, row: Row) -> Outlook | None:
        """The outlook of the tokens that the grammar forces now; an average while a token is in flight."""
        if row.matcher is None or not row.matcher.begun:
            return None
        forced = len(row.matcher.forced)
        is_ahead = row.sampled > len(row.tokens) - row.prompt_tokens
        if is_ahead:
            self._often += _GAIN * ((forced > 0) - self._often)
            self._length += _GAIN * (forced - self._length) if forced else 0.0
        left = forced - is_ahead
        if left > 0:
            return Outlook(self._chance, self._chance, left)
        return Outlook(self._often * self._chance, self._chance, round(self._length)) if is_ahead else None

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """It, as the tokenizer would cut it."""
        return [
            () if row.matcher is None else row.matcher.forced[:most]
            for row, most in zip(rows, tokens_max, strict=True)
        ]

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """Learn how often the model cuts it so."""
        for is_right in [1] * accepted + [0] * (accepted < proposed):
            self._chance += _GAIN * (is_right - self._chance)
