"""Drafts that came with the request: the output that its sender expects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.source import RUN_MIN

# Length of the match that finds an output in its prediction again.
_SIZE = 3


class Predictions:
    """Drafts for rows whose request has a prediction."""

    name = "prediction"
    prior = 0.5

    def __init__(self) -> None:
        self._positions: dict[Row, PredictionPosition] = {}

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """The prediction's next tokens, while the output follows it."""
        return [
            self._position(row).draft(row.tokens, count) if row.prediction else ()
            for row, count in zip(rows, counts, strict=True)
        ]

    def release(self) -> None:
        """Drop the positions of rows that are gone."""
        self._positions = {row: position for row, position in self._positions.items() if not row.gone}

    def clear(self) -> None:
        """Drop all positions."""
        self._positions.clear()

    def _position(self, row: Row) -> PredictionPosition:
        position = self._positions.get(row)
        if position is None:
            position = self._positions[row] = PredictionPosition(row.prediction, row.prompt_tokens)
        return position


class PredictionPosition:
    """The position `next` in a prediction that an output has reached; None if it is not known.

    An output that has left the prediction is found in it again by its last three tokens, at the first occurrence
    after the place where it left, if there is one. Until then it is taken to have changed one token, if several
    before it were right.
    """

    __slots__ = ("_ends", "_left_at", "_prediction", "_read", "_run", "_start", "next")

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self._prediction = prediction
        self._start = self._read = start
        self._left_at = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for place in range(_SIZE, len(prediction)):
            self._ends.setdefault(tuple(prediction[place - _SIZE : place]), []).append(place)
        self.next: int | None = 0
        self._run = 0

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Follow the new ones of `tokens`, prompt and output; up to `count` next tokens of the prediction."""
        for place in range(self._read, len(tokens)):
            expected = self.next
            if expected is not None:
                is_right = self._prediction[expected] == tokens[place]
                self._left_at = expected + is_right
                is_lost = not is_right and self._run < RUN_MIN
                self._run = self._run + 1 if is_right else 0
                self.next = None if is_lost or expected + 1 >= len(self._prediction) else expected + 1
            if not self._run and place + 1 - self._start >= _SIZE:
                ends = self._ends.get(tuple(tokens[place + 1 - _SIZE : place + 1]))
                if ends:
                    self.next = ends[bisect_left(ends, self._left_at) % len(ends)]
        self._read = len(tokens)
        return () if self.next is None else self._prediction[self.next : self.next + count]
