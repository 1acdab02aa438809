"""Drafts from a row's own text: the tokens that followed the last occurrence of its last three."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.source import RUN_MIN

# Length of a match. Shorter ones occur by chance too often.
_SIZE = 3
# Maximum tokens of a prompt that are indexed, counted from its end: about 1 ms and 2 MB.
_PROMPT_TOKENS_MAX = 16_384


class Ngrams:
    """Drafts from an index of each row's prompt and output."""

    name = "ngram"
    prior = 0.2

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._indexes: dict[Row, NgramIndex] = {}

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """The tokens after each row's match."""
        found: list[Sequence[int]] = []
        for row, count in zip(rows, counts, strict=True):
            index = self._indexes.get(row)
            if index is None:
                index = self._indexes[row] = NgramIndex(row.tokens, self._vocab_size)
            found.append(index.draft(row.tokens, count))
        return found

    def release(self) -> None:
        """Drop the indexes of rows that are gone."""
        self._indexes = {row: index for row, index in self._indexes.items() if not row.gone}

    def clear(self) -> None:
        """Drop all indexes."""
        self._indexes.clear()


class NgramIndex:
    """The last position after each three tokens of a text, and `match`, the position that its end repeats (0: none).

    A match stays while new tokens equal those after it, so that a later but shorter match does not replace it. After a
    run of several it survives one differing token, as where one field of a text was changed, unless the last three
    tokens occur elsewhere.
    """

    __slots__ = ("_ends", "_gram", "_read", "_run", "_vocab_size", "match")

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.match = 0
        self._run = 0
        # `draft` enters the last token, after the lookup.
        self._read = len(tokens) - 1
        start = max(0, self._read - _PROMPT_TOKENS_MAX)
        grams = self._grams(np.asarray(tokens[start : self._read], np.uint64))
        self._ends: dict[int, int] = dict(zip(grams, range(start + _SIZE, self._read + 1), strict=True))
        self._gram = 0
        for token in tokens[max(0, self._read - _SIZE) : self._read]:
            self._gram = self._gram * vocab_size + token

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Index the new ones of `tokens`, and return `count` tokens after the match, repeated periodically past the
        end."""
        ends, match, run, gram = self._ends, self.match, self._run, self._gram
        size, kept = self._vocab_size, self._vocab_size ** (_SIZE - 1)
        for index in range(self._read, len(tokens)):
            token, beyond = tokens[index], 0
            if match:
                if tokens[match] == token:
                    match, run = match + 1, run + 1
                else:
                    match, run, beyond = 0, 0, match + 1 if run >= RUN_MIN else 0
            gram = gram % kept * size + token
            match = match or ends.get(gram, beyond)
            ends[gram] = index + 1
        self._read, self.match, self._run, self._gram = len(tokens), match, run, gram
        if not match:
            return []
        found = list(tokens[match : match + count])
        period = len(tokens) - match
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _grams(self, tokens: np.ndarray) -> list[int]:
        """Every three consecutive tokens as one number."""
        if len(tokens) < _SIZE:
            return []
        size = np.uint64(self._vocab_size)
        grams: list[int] = ((tokens[:-2] * size + tokens[1:-1]) * size + tokens[2:]).tolist()
        return grams
