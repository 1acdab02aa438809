"""Caches of prompts seen before, so that a shared beginning is not computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.parked_rows import ParkedRow, ParkedRows
from zmqengine.engine.prefix_index import PREFIX_TOKENS_MIN, Entry, PrefixIndex
from zmqengine.engine.row import Caches, Row


class PrefixCache:
    """Caches by the tokens they hold, in at most `bytes_max`, which `limit` may lower and raise again.

    The least recently used go first; then those on *offer*, which nobody gets before a finite logit was made of
    them; then those of parked rows.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = self._bytes_most = bytes_max
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self._index = PrefixIndex()
        self._entries_bytes = 0
        self._offers: OrderedDict[Entry, None] = OrderedDict()
        self._offers_index = PrefixIndex()
        self._offers_bytes = 0
        self._parked = ParkedRows()
        self._unsettled: list[mx.array] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What all but parked rows take."""
        return self._entries_bytes + self._offers_bytes

    @property
    def parked_bytes(self) -> int:
        """What parked rows take, beside `bytes`."""
        return self._parked.bytes

    def fetch(self, tokens: Sequence[int] | np.ndarray) -> tuple[int, Caches] | None:
        """A copy of the caches that hold the longest beginning of `tokens`, and how long it is.

        It is always shorter than `tokens`: a row needs one token to start from.
        """
        entry, length = self._index.best(np.asarray(tokens, np.uint32))
        if entry is None:
            return None
        self._entries.move_to_end(entry)
        return length, kv.take_prefix(entry.caches, len(entry.tokens), length)

    def longest(self, tokens: np.ndarray) -> int:
        """How many tokens `fetch` would give."""
        return self._index.best(tokens)[1]

    def awaited(self, tokens: np.ndarray) -> int:
        """How many tokens `fetch` would give if all that is on offer were accepted."""
        return self._offers_index.best(tokens)[1]

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether caches that hold `tokens` would tell anything new."""
        if self.bytes_max <= 0 or len(tokens) < PREFIX_TOKENS_MIN:
            return False
        return not self._index.covers(np.asarray(tokens, np.uint32))

    def offer(self, tokens: Sequence[int], caches: Caches) -> Entry:
        """Hold `caches`, which hold `tokens` and belong to nobody else, until `accept` or `withdraw`.

        `settle` must follow.
        """
        entry = Entry.of(tokens, caches)
        if entry.bytes <= self.bytes_max - self._parked.bytes:
            self._unsettled += kv.arrays(caches)
            self._offers[entry] = None
            self._offers_index.add(entry)
            self._offers_bytes += entry.bytes
            self._evict()
        return entry

    def accept(self, offer: Entry) -> None:
        """A finite logit was made of these caches: let others have them."""
        if self.withdraw(offer):
            self._add(offer)

    def withdraw(self, offer: Entry) -> bool:
        """Drop caches on offer; returns whether they were still held."""
        if offer not in self._offers:
            return False
        del self._offers[offer]
        self._offers_index.discard(offer)
        self._offers_bytes -= offer.bytes
        return True

    def prove(self, row: Row) -> None:
        """`row` ends before its first logit: look at what it offers instead, which waits for it."""
        for offer in row.offers:
            if offer in self._offers and kv.are_finite(offer.caches):
                self.accept(offer)
            else:
                self.withdraw(offer)
        row.offers = []

    def store(self, tokens: Sequence[int], caches: Caches) -> None:
        """Keep `caches`, which are known to be good. `settle` must follow."""
        self.accept(self.offer(tokens, caches))

    def park(self, parked: ParkedRow) -> int:
        """Keep a row until it comes back; returns how many tokens it need not read again. `settle` must follow."""
        if parked.bytes > self.bytes_max:
            return 0
        self._unsettled += kv.arrays(parked.caches)
        self._parked.add(parked)
        self._evict()
        return parked.reusable

    def take(self, row: Row) -> ParkedRow | None:
        """What is kept of the parked row that has come back as `row`, which owns it from now on."""
        return self._parked.take(row)

    def forget(self, row_id: int) -> None:
        """This parked row will not come back: keep it as any other. `settle` must follow."""
        parked = self._parked.pop(row_id)
        # Without a token made of them, nobody knows that its caches are good.
        if parked is not None and parked.made is not None and self.wants(parked.tokens):
            self.store(parked.tokens, parked.caches)

    def settle(self) -> None:
        """Start to compute what was stored, so that no entry keeps a whole batch alive, or waits for another thread."""
        if self._unsettled:
            kv.start(self._unsettled)
            self._unsettled = []

    def limit(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on, and no more than at first; returns the bytes dropped."""
        before = self.bytes + self._parked.bytes
        self.bytes_max = min(bytes_max, self._bytes_most)
        self._evict()
        return before - self.bytes - self._parked.bytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._index.clear()
        self._offers.clear()
        self._offers_index.clear()
        self._parked.clear()
        self._unsettled = []
        self._entries_bytes = self._offers_bytes = 0

    def _evict(self) -> None:
        while self._entries and self.bytes + self._parked.bytes > self.bytes_max:
            self._drop(next(iter(self._entries)))
        while self._offers and self.bytes + self._parked.bytes > self.bytes_max:
            self.withdraw(next(iter(self._offers)))
        self._parked.trim(self.bytes_max)

    def _add(self, entry: Entry) -> None:
        if self._index.covers(entry.tokens):
            return
        for covered in self._index.covered_by(entry):
            self._drop(covered)
        self._entries[entry] = None
        self._index.add(entry)
        self._entries_bytes += entry.bytes

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry]
        self._index.discard(entry)
        self._entries_bytes -= entry.bytes
