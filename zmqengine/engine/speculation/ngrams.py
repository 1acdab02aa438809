"""Drafts without a second model: what followed the last time a row's last tokens stood in its prompt or output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.chances import CHANCE_MAX, DRAFT_TOKENS_MAX, RUN_MIN, Chances
from zmqengine.engine.speculation.source import Outlook

# So many tokens in a row must be the same. Fewer are the same by chance too often.
_SIZE = 3
# Of a prompt, the last so many tokens are looked up: about 1 ms to index, and 2 MB.
_PROMPT_TOKENS_MAX = 16_384


class Ngrams:
    """The source; what a row has said is kept with the row."""

    name = "ngram"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chances = Chances(0.2, 0.7)

    def follow(self, row: Row) -> Outlook | None:
        """The outlook of copying from an earlier match of the last tokens, if there is one."""
        history = row.history
        if history is None:
            history = row.history = History(row.tokens, self._vocab_size, self._chances.of_row())
        history.follow(row.tokens)
        if not history.match:
            return None
        first = history.chances.further if history.is_confirmed else history.chances.first
        return Outlook(first, min(history.chances.further, CHANCE_MAX), DRAFT_TOKENS_MAX)

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """The tokens that followed the earlier match."""
        return [
            [] if row.history is None else row.history.continuation(row.tokens, count)
            for row, count in zip(rows, tokens_max, strict=True)
        ]

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """Nothing: what a match foretells is compared with every token that comes, drafted or not."""


class History:
    """Where each three tokens of a text last stood, and the place that goes on like its end: `match`, 0 for none.

    A match is kept while it foretells the tokens that come, so that it is told apart from a later one that is shorter;
    then it `is_confirmed`. One that has foretold several is kept beyond a token that differs, as where one field of a
    text was changed, unless the last three tokens say another place.
    """

    __slots__ = ("_places", "_read", "_run", "_vocab_size", "_word", "chances", "is_confirmed", "match")

    def __init__(self, tokens: Sequence[int], vocab_size: int, chances: Chances) -> None:
        self._vocab_size = vocab_size
        self.chances = chances
        self.match = 0
        self.is_confirmed = False
        self._run = 0
        # The last token is left to `follow`, which looks it up before it is entered.
        self._read = len(tokens) - 1
        start = max(0, self._read - _PROMPT_TOKENS_MAX)
        words = self._words(np.asarray(tokens[start : self._read], np.uint64))
        self._places: dict[int, int] = dict(zip(words, range(start + _SIZE, self._read + 1), strict=True))
        self._word = 0
        for token in tokens[max(0, self._read - _SIZE) : self._read]:
            self._word = self._word * vocab_size + token

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what is new of `tokens`."""
        places, match, run = self._places, self.match, self._run
        size, kept = self._vocab_size, self._vocab_size ** (_SIZE - 1)
        for place in range(self._read, len(tokens)):
            token, beyond = tokens[place], 0
            if match:
                is_right = tokens[match] == token
                self.chances.learn(is_right, is_first=not run)
                if is_right:
                    match, run = match + 1, run + 1
                else:
                    match, run, beyond = 0, 0, match + 1 if run >= RUN_MIN else 0
            self._word = word = self._word % kept * size + token
            if not match:
                match = places.get(word, beyond)
            places[word] = place + 1
        self._read = len(tokens)
        self.match, self._run = match, run
        self.is_confirmed = run > 0

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens after the match; past the end of the text it repeats periodically."""
        if not self.match:
            return []
        found = list(tokens[self.match : self.match + count])
        period = len(tokens) - self.match
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _words(self, tokens: np.ndarray) -> list[int]:
        if len(tokens) < _SIZE:
            return []
        size = np.uint64(self._vocab_size)
        words = (tokens[:-2] * size + tokens[1:-1]) * size + tokens[2:]
        return list(map(int, words.tolist()))
