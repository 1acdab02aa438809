"""Caches of prompts seen before, so that a shared beginning is not computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from zmqengine.engine import caches as kv
from zmqengine.engine.parked_rows import ParkedRow, ParkedRows
from zmqengine.engine.row import Caches, Row

# A shorter shared beginning is not worth a copy. Entries are found by their first tokens, this many.
PREFIX_TOKENS_MIN = 16


@dataclass(eq=False)
class _Entry:
    tokens: np.ndarray
    caches: Caches
    bytes: int


class PrefixCache:
    """Caches by the tokens they hold; the least recently used go first when they are over `bytes_max`, and parked
    rows after all others."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._parked = ParkedRows()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._families: dict[bytes, dict[int, _Entry]] = {}
        self._count = 0
        self._unsettled: list[mx.array] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def parked_bytes(self) -> int:
        """What parked rows take, beside `bytes`."""
        return self._parked.bytes

    def park(self, parked: ParkedRow) -> int:
        """Keep a row until it comes back; returns how many tokens it need not read again. `settle` must follow."""
        if parked.bytes > self.bytes_max:
            return 0
        self._unsettled += kv.arrays(parked.caches)
        self._parked.add(parked)
        self.trim(self.bytes_max)
        return parked.reusable

    def forget(self, row_id: int) -> None:
        """This parked row will not come back: keep it as any other. `settle` must follow."""
        parked = self._parked.pop(row_id)
        # Without a token made of them, nobody knows that its caches are good.
        if parked is not None and parked.made is not None and self.wants(parked.tokens):
            self.store(parked.tokens, parked.caches)

    def take(self, row: Row) -> ParkedRow | None:
        """What is kept of the parked row that has come back as `row`, which owns it from now on."""
        return self._parked.take(row)

    def fetch(self, tokens: Sequence[int] | np.ndarray) -> tuple[int, Caches] | None:
        """A copy of the caches that hold the longest beginning of `tokens`, and how long it is.

        It is always shorter than `tokens`: a row needs one token to start from.
        """
        number, length = self._best(np.asarray(tokens, np.uint32))
        if not length:
            return None
        self._entries.move_to_end(number)
        entry = self._entries[number]
        return length, kv.take_prefix(entry.caches, len(entry.tokens), length)

    def longest(self, tokens: np.ndarray) -> int:
        """How many tokens `fetch` would give."""
        return self._best(tokens)[1]

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether caches that hold `tokens` would tell anything new."""
        if self.bytes_max <= 0 or len(tokens) < PREFIX_TOKENS_MIN:
            return False
        ours = np.asarray(tokens, np.uint32)
        family = self._families.get(_family(ours), {})
        return not any(_covers(entry, ours) for entry in family.values())

    def store(self, tokens: Sequence[int], caches: Caches) -> None:
        """Keep `caches`, which hold `tokens` and belong to nobody else. `settle` must follow."""
        entry = _Entry(np.asarray(tokens, np.uint32), caches, kv.byte_count(caches))
        if entry.bytes > self.bytes_max - self._parked.bytes:
            return
        self._unsettled += kv.arrays(caches)
        family = self._families.get(_family(entry.tokens), {})
        for number in [number for number, other in family.items() if _covers(entry, other.tokens)]:
            self._drop(number)
        self._count += 1
        self._entries[self._count] = entry
        self._families.setdefault(_family(entry.tokens), {})[self._count] = entry
        self.bytes += entry.bytes
        self.trim(self.bytes_max)

    def settle(self) -> None:
        """Start to compute what was stored, so that no entry keeps a whole batch alive, or waits for another thread."""
        if self._unsettled:
            kv.start(self._unsettled)
            self._unsettled = []

    def trim(self, bytes_max: int) -> int:
        """Drop least recently used entries, then parked rows, until `bytes_max` is kept; returns the bytes dropped."""
        before = self.bytes + self._parked.bytes
        while self._entries and self.bytes + self._parked.bytes > bytes_max:
            self._drop(next(iter(self._entries)))
        self._parked.trim(bytes_max)
        return before - self.bytes - self._parked.bytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._families.clear()
        self._parked.clear()
        self._unsettled = []
        self.bytes = 0

    def _best(self, tokens: np.ndarray) -> tuple[int, int]:
        """The entry that holds most of the beginning of `tokens`, and how much; (0, 0) for none."""
        best = (0, 0)
        if len(tokens) > PREFIX_TOKENS_MIN:
            for number, entry in self._families.get(_family(tokens), {}).items():
                length = shared_tokens(entry.tokens, tokens[:-1])
                if length > best[1] and (length == len(entry.tokens) or kv.can_trim(entry.caches)):
                    best = (number, length)
        return best

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self.bytes -= entry.bytes
        key = _family(entry.tokens)
        del self._families[key][number]
        if not self._families[key]:
            del self._families[key]


def _family(tokens: np.ndarray) -> bytes:
    return tokens[:PREFIX_TOKENS_MIN].tobytes()


def _covers(entry: _Entry, tokens: np.ndarray) -> bool:
    """Whether `entry` can serve whatever caches of `tokens` could."""
    shared = shared_tokens(entry.tokens, tokens)
    return shared == len(tokens) and (shared == len(entry.tokens) or kv.can_trim(entry.caches))


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens at the beginning are the same."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
