"""Drafts that came with the request: what its sender expects the output to be like."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.chances import CHANCE_MAX, DRAFT_TOKENS_MAX, RUN_MIN, Chances
from zmqengine.engine.speculation.source import Outlook

# After a difference, so many tokens in a row say where the output goes on.
_SIZE = 3


class Predictions:
    """The source. It has something to say only of rows whose request has a prediction."""

    name = "prediction"

    def __init__(self) -> None:
        self._chances = Chances(0.5, 0.8)

    def follow(self, row: Row) -> Outlook | None:
        """The outlook of the prediction while the output follows it."""
        if not row.prediction:
            return None
        place = row.prediction_place
        if place is None:
            place = row.prediction_place = PredictionPlace(
                row.prediction, row.prompt_tokens, self._chances.of_row()
            )
        place.follow(row.tokens)
        if place.next is None:
            return None
        chances = place.chances
        first = chances.further if place.is_confirmed else chances.first
        return Outlook(min(first, CHANCE_MAX), min(chances.further, CHANCE_MAX), DRAFT_TOKENS_MAX)

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """The prediction's next tokens."""
        return [
            () if row.prediction_place is None else row.prediction_place.coming(count)
            for row, count in zip(rows, tokens_max, strict=True)
        ]

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """Nothing: the prediction is compared with every token that comes, drafted or not."""


class PredictionPlace:
    """Where in a prediction the output of a row stands: its token `next` is expected, None if that cannot be told.

    An output that has left the prediction is found in it again by its last three tokens, after the place where it left
    if they stand there; until then it is taken to have changed one token, if several were right before. A place that
    has foretold a token `is_confirmed`.
    """

    __slots__ = ("_left_at", "_places", "_read", "_run", "_start", "_text", "chances", "is_confirmed", "next")

    def __init__(self, text: Sequence[int], start: int, chances: Chances) -> None:
        self._text = text
        self._start = self._read = start
        self._left_at = 0
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place in range(_SIZE, len(text)):
            self._places.setdefault(tuple(text[place - _SIZE : place]), []).append(place)
        self.chances = chances
        self.next: int | None = 0
        # Whoever sends a prediction expects it from the first token on.
        self.is_confirmed = True
        self._run = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what is new of `tokens`, prompt and output."""
        for place in range(self._read, len(tokens)):
            expected = self.next
            if expected is not None:
                is_right = self._text[expected] == tokens[place]
                self.chances.learn(is_right, is_first=not self.is_confirmed)
                self.is_confirmed = is_right
                self._left_at = expected + is_right
                is_lost = not is_right and self._run < RUN_MIN
                self._run = self._run + 1 if is_right else 0
                self.next = None if is_lost or expected + 1 >= len(self._text) else expected + 1
            if not self._run and place + 1 - self._start >= _SIZE:
                found = self._found(tokens[place + 1 - _SIZE : place + 1])
                self.next = self.next if found is None else found
                self.is_confirmed = False
        self._read = len(tokens)

    def coming(self, count: int) -> Sequence[int]:
        """The next tokens of the prediction."""
        return () if self.next is None else self._text[self.next : self.next + count]

    def _found(self, last: Sequence[int]) -> int | None:
        places = self._places.get(tuple(last))
        if not places:
            return None
        return places[bisect_left(places, self._left_at) % len(places)]
