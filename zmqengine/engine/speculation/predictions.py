"""Drafts from the request's prediction, the output that its sender expects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.source import RUN_MIN

# Length of the match that relocates an output in its prediction.
_SIZE = 3
# Tokens of a prediction indexed at once, about 2 ms; a prediction may be as long as the context.
_INDEXED_TOKENS = 16_384
# Bits of a token id in an index; a collision of ids that differ only in higher bits costs a rejected draft.
_ID_BITS = 21


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

    An output that has diverged is relocated by its last three tokens, at their first occurrence after the point of
    divergence, else before it. Until then the output is assumed to have replaced one token, if several before it were
    right. The search covers the tokens around that point, or all of a short prediction.
    """

    __slots__ = ("_begin", "_ends", "_grams", "_left_at", "_prediction", "_read", "_run", "_start", "next")

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self._prediction = prediction
        self._start = self._read = start
        self._left_at = 0
        self.next: int | None = 0
        self._run = 0
        self._index(0)

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Follow the new ones of `tokens`, prompt and output; up to `count` next tokens of the prediction."""
        for index in range(self._read, len(tokens)):
            expected = self.next
            if expected is not None:
                is_right = self._prediction[expected] == tokens[index]
                self._left_at = expected + is_right
                is_lost = not is_right and self._run < RUN_MIN
                self._run = self._run + 1 if is_right else 0
                self.next = None if is_lost or expected + 1 >= len(self._prediction) else expected + 1
            if not self._run and index + 1 - self._start >= _SIZE:
                self.next = self._find(tokens[index + 1 - _SIZE : index + 1], self.next)
        self._read = len(tokens)
        return () if self.next is None else self._prediction[self.next : self.next + count]

    def _find(self, gram: Sequence[int], otherwise: int | None) -> int | None:
        if self._left_at >= self._begin + _INDEXED_TOKENS * 3 // 4:
            self._index(self._left_at - _INDEXED_TOKENS // 4)
        wanted = np.uint64((gram[0] << 2 * _ID_BITS) + (gram[1] << _ID_BITS) + gram[2])
        first, last = self._grams.searchsorted(wanted), self._grams.searchsorted(wanted, "right")
        if first == last:
            return otherwise
        ends = self._ends[first:last]
        return int(ends[ends.searchsorted(self._left_at) % len(ends)])

    def _index(self, begin: int) -> None:
        """Index the tokens from `begin` on: `_grams` in order, and in `_ends` the position after each."""
        self._begin = begin
        ids = np.asarray(self._prediction[begin : begin + _INDEXED_TOKENS], np.uint64)
        # The last three are followed by nothing.
        grams = (ids[:-3] << 2 * _ID_BITS) + (ids[1:-2] << _ID_BITS) + ids[2:-1]
        order = grams.argsort(kind="stable")
        self._grams = grams[order]
        self._ends = order + (begin + _SIZE)
