"""Finds, among kept caches, those that hold the beginning of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.row import Caches

# A shorter shared beginning is not worth a copy. Entries are found by their first tokens, this many.
PREFIX_TOKENS_MIN = 16


@dataclass(frozen=True, eq=False)
class Entry:
    """Caches and the tokens that they hold."""

    tokens: np.ndarray
    caches: Caches
    bytes: int

    @classmethod
    def of(cls, tokens: Sequence[int], caches: Caches) -> Entry:
        """`caches`, which hold `tokens` and belong to nobody else."""
        return cls(np.asarray(tokens, np.uint32), caches, kv.byte_count(caches))

    def serves(self, tokens: np.ndarray) -> int:
        """How much of the beginning of `tokens` these caches can give: all that is shared, or all or nothing."""
        length = shared_tokens(self.tokens, tokens)
        return length if length == len(self.tokens) or kv.can_trim(self.caches) else 0


class PrefixIndex:
    """Entries by their first tokens."""

    def __init__(self) -> None:
        self._families: dict[bytes, dict[Entry, None]] = {}

    def add(self, entry: Entry) -> None:
        """Take an entry in."""
        self._families.setdefault(_family(entry.tokens), {})[entry] = None

    def discard(self, entry: Entry) -> None:
        """Drop an entry that is here."""
        key = _family(entry.tokens)
        del self._families[key][entry]
        if not self._families[key]:
            del self._families[key]

    def best(self, tokens: np.ndarray) -> tuple[Entry | None, int]:
        """The entry that holds most of the beginning of `tokens`, and how much.

        It is always shorter than `tokens`: a row needs one token to start from.
        """
        best: tuple[Entry | None, int] = (None, 0)
        if len(tokens) > PREFIX_TOKENS_MIN:
            for entry in self._relatives(tokens):
                length = entry.serves(tokens[:-1])
                if length > best[1]:
                    best = (entry, length)
        return best

    def covers(self, tokens: np.ndarray) -> bool:
        """Whether an entry serves whatever caches of `tokens` could."""
        return any(entry.serves(tokens) == len(tokens) for entry in self._relatives(tokens))

    def covered_by(self, entry: Entry) -> list[Entry]:
        """Entries that `entry` can stand in for."""
        relatives = self._relatives(entry.tokens)
        return [other for other in relatives if entry.serves(other.tokens) == len(other.tokens)]

    def clear(self) -> None:
        """Drop everything."""
        self._families.clear()

    def _relatives(self, tokens: np.ndarray) -> dict[Entry, None]:
        return self._families.get(_family(tokens), {})


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens at the beginning are the same."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _family(tokens: np.ndarray) -> bytes:
    return tokens[:PREFIX_TOKENS_MIN].tobytes()
