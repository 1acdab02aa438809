"""Prompts that were read, and what followed them, within a number of bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.prefix_cache.block import StoredBlock
from zmqengine.engine.prefix_cache.branches import whole
from zmqengine.engine.prefix_cache.counts import Counts
from zmqengine.engine.prefix_cache.index import Node
from zmqengine.engine.prefix_cache.kept_blocks import KeptBlocks
from zmqengine.engine.prefix_cache.lookup import PREFIX_TOKENS_MIN, Lookup
from zmqengine.engine.prefix_cache.offers import Offer, Offers, make_offer
from zmqengine.engine.prefix_cache.parked_rows import ParkedRow, ParkedRows
from zmqengine.engine.row import Caches, Row

_PINNED_SHARE = 0.5
_TOKEN_BYTES = 4


class Hit(NamedTuple):
    """Caches that hold the first `tokens` of a row, for it alone. `known` of them are kept, if not usable as they are.

    `differs` is what is kept in place of the tokens that follow those, if anything is.
    """

    tokens: int
    caches: Caches | None
    known: int
    differs: np.ndarray | None


class PrefixCache:
    """What was read, by blocks of tokens, in at most `bytes_max`, which `limit` may lower and raise again.

    Without a `layout` nothing is kept but parked rows. `facts` say what decides what caches hold: prompts that are
    alike under other facts, or in another scope, are others. What is worth least goes first; then what is on *offer*,
    which nobody gets before a finite logit was made of it; then what is awaited or pinned; then parked rows.
    """

    def __init__(
        self, model: Any, layout: kv.BlockLayout | None, bytes_max: int, facts: Mapping[str, str]
    ) -> None:
        self.bytes_max = self._bytes_most = bytes_max
        self.kept = KeptBlocks(cut_anywhere=layout is not None and layout.is_cut_anywhere)
        self.lookup = Lookup(self.kept, facts)
        self.counts = Counts()
        self._model = model
        self._layout = layout
        self._offers = Offers()
        self.parked = ParkedRows()
        self._unsettled: list[mx.array] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks but those of preempted rows."""
        return self.kept.kept_bytes + self._offers.bytes

    @property
    def keeps_states(self) -> bool:
        """Whether what is kept can be used only where a state was kept."""
        return self._layout is not None and not self._layout.is_cut_anywhere

    def may_keep(self, row: Row) -> bool:
        """Whether there is room for all that `row` reads."""
        return self._layout is not None and len(row.tokens) <= self._tokens_max(self._layout)

    # --- what is there ---

    def fetch(self, row: Row) -> Hit:
        """Caches that hold the longest beginning of what `row` has to read, and how long it is.

        It is always shorter than that: a row needs one token to start from.
        """
        match = self.lookup.match(row, len(row.ids) - 1)
        nodes, length = self.kept.usable(match)
        hit = Hit(0, None, match.tokens, match.differs)
        if self._layout is not None and length >= PREFIX_TOKENS_MIN:
            parts = [node.block.arrays for node in nodes]
            caches = self._layout.build(self._model, parts, length, nodes[-1].block.checkpoint)
            hit = hit._replace(tokens=length, caches=caches)
            self.kept.use(nodes)
            self.counts.hit(nodes, length)
        if row.is_pinned and match.nodes and match.tokens == len(row.ids) - 1:
            self._pin(match.nodes[-1])
        return hit

    def awaited(self, row: Row) -> int:
        """How many tokens `fetch` would give if all that is on offer were accepted."""
        return self._offers.awaited(row.ids[:-1], self.lookup.salt(row.scope))

    def wants(self, row: Row) -> bool:
        """Whether what `row` holds now would tell anything new."""
        if self.bytes_max <= 0 or self.lookup.is_known(row):
            return False
        self.counts.refused["not possible with this model"] += self._layout is None
        return self._layout is not None

    # --- what comes ---

    def offer(self, row: Row, source: Caches | kv.BatchRow) -> Offer | None:
        """Hold a copy of what `row` holds and is not kept yet, until `accept` or `withdraw`. `settle` must follow.

        `source`: the caches of the row alone, or the row in its batch. None if there is no room.
        """
        layout = self._layout
        assert layout is not None, "nothing is wanted"
        keys = self.lookup.keys(row, row.held)
        begin = max(self.lookup.kept_tokens(keys, row.held), whole(self._offers.tokens_of(row.id)))
        end = row.held if self.may_keep(row) else min(row.held, max(begin, whole(self._tokens_max(layout))))
        # A state fits whole or not at all.
        if end < row.held and (end == begin or self.keeps_states):
            self.counts.refused["too long"] += 1
            return None
        offer = make_offer(row, begin, end, [self.lookup.salt(row.scope), *keys], layout, source)
        if offer.bytes > self.bytes_max - self.parked.bytes:
            self.counts.refused["too long"] += 1
            return None
        self._unsettled += offer.arrays()
        self._offers.add(offer)
        self._make_room()
        return offer

    def accept(self, offer: Offer | None) -> None:
        """A finite logit was made of what is on offer: let others have it."""
        if offer is None or not self._offers.remove(offer):
            return
        for block in offer.blocks:
            self.kept.add(block)
        node = self.kept.index.get(offer.key)
        if node is None:
            # What came before it has gone meanwhile, or a longer block has come.
            return
        if offer.checkpoint is not None and node.block.checkpoint is None:
            self.kept.add_state(node, offer.checkpoint)
        if offer.is_pinned:
            self._pin(node)
        self._make_room()

    def withdraw(self, offer: Offer) -> None:
        """Drop an offer whose logits are not finite."""
        self.counts.refused["not finite"] += self._offers.remove(offer)

    def prove(self, row: Row) -> None:
        """`row` ends before its first logit: look at what it offers instead, which waits for it."""
        are_good = True
        for offer in row.offers:
            # What was read after something bad is no better.
            are_good = are_good and offer in self._offers and kv.all_finite(offer.arrays())
            if are_good:
                self.accept(offer)
            else:
                self.withdraw(offer)
        row.offers = []

    def insert_blocks(self, blocks: Sequence[StoredBlock], awaited_by: Hashable) -> int:
        """Keep blocks from elsewhere that are known to be good, each the parent of the next, as far as there is room,
        and until `release` as long as there is.

        Returns how many tokens of their prompt are kept now.
        """
        known = {block.key for block in blocks if self.kept.holds(block)}
        taken = self.parked.bytes + self._offers.bytes + self.kept.staying.bytes
        nodes = self.kept.add_all(blocks, self.bytes_max - taken)
        self.counts.restored(nodes, known)
        self.kept.staying.hold(nodes, awaited_by)
        self._make_room()
        return nodes[-1].block.end if nodes and nodes[-1].is_kept else 0

    def release(self, awaited_by: Hashable) -> None:
        """Release awaited blocks, used or not."""
        self.kept.staying.release(awaited_by)

    # --- rows that will come back ---

    def park(self, parked: ParkedRow) -> int:
        """Keep a row until it comes back; returns how many tokens it need not read again. `settle` must follow."""
        if parked.bytes > self.bytes_max:
            return 0
        self._unsettled += kv.arrays(parked.caches)
        self.parked.add(parked)
        self._make_room()
        return parked.reusable

    def forget(self, row_id: int) -> None:
        """This parked row will not come back: keep it as any other. `settle` must follow."""
        parked = self.parked.pop(row_id)
        # Without a token made of them, nobody knows that its caches are good.
        if parked is not None and parked.made is not None and self.wants(parked.row):
            self.accept(self.offer(parked.row, parked.caches))

    # --- room ---

    def settle(self) -> None:
        """Start to compute what was stored, so that no block keeps a whole batch alive, or waits for another thread."""
        if self._unsettled:
            kv.start(self._unsettled)
            self._unsettled = []

    def limit(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on, and no more than at first; returns the bytes dropped."""
        before = self.held_bytes + self.parked.bytes
        self.bytes_max = min(bytes_max, self._bytes_most)
        self._make_room()
        return before - self.held_bytes - self.parked.bytes

    def clear(self) -> None:
        """Drop everything."""
        self.kept.clear()
        self._offers.clear()
        self.parked.clear()
        self._unsettled = []

    def _make_room(self) -> None:
        while self.held_bytes + self.parked.bytes > self.bytes_max:
            if self.kept.evict():
                continue
            if (offer := self._offers.oldest()) is not None:
                self._offers.remove(offer)
                self.counts.refused["no room"] += 1
            elif not self.kept.staying.let_go():
                break
        self.parked.trim(self.bytes_max)
        self.kept.tell_evicted()

    def _tokens_max(self, layout: kv.BlockLayout) -> int:
        return max(0, self.bytes_max - self.parked.bytes) // (layout.token_bytes + _TOKEN_BYTES)

    def _pin(self, node: Node) -> None:
        if not self.kept.staying.pin(node, int(self.bytes_max * _PINNED_SHARE)):
            self.counts.refused["too long to pin"] += 1


def numbers(store: PrefixCache) -> dict[str, int]:
    """The prefix cache's figures for `status`."""
    blocks, pinned_bytes = len(store.kept.index), store.kept.staying.pinned_bytes
    return {"blocks": blocks, "pinned_bytes": pinned_bytes, **store.counts.numbers()}
