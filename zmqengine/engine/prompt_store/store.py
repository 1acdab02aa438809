"""Prompts that were read, and what followed them, within a number of bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.prompt_store.block import Checkpoint, StoredBlock
from zmqengine.engine.prompt_store.branches import whole
from zmqengine.engine.prompt_store.eviction import EvictionOrder
from zmqengine.engine.prompt_store.index import BlockIndex, Match, Node
from zmqengine.engine.prompt_store.keys import BLOCK_TOKENS, block_keys, chained, salt_of
from zmqengine.engine.prompt_store.offers import Offer, Offers
from zmqengine.engine.prompt_store.parked_rows import ParkedRow, ParkedRows
from zmqengine.engine.prompt_store.tier import Tier
from zmqengine.engine.row import Caches, Row

PREFIX_TOKENS_MIN = 16
"""A shorter shared beginning is not worth a copy."""
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


class PromptStore:
    """What was read, by blocks of tokens, in at most `bytes_max`, which `limit` may lower and raise again.

    Without a `layout` nothing is kept but parked rows. `facts` say what decides what caches hold: prompts that are
    alike under other facts, or in another scope, are others. What is worth least goes first; then what is on *offer*,
    which nobody gets before a finite logit was made of it; then what is pinned; then parked rows.
    """

    def __init__(
        self, model: Any, layout: kv.BlockLayout | None, bytes_max: int, facts: Mapping[str, str]
    ) -> None:
        self.bytes_max = self._bytes_most = bytes_max
        self.tier: Tier | None = None
        self.refused: Counter[str] = Counter()
        """Prompts that were not kept, by reason."""
        self.restored_tokens = self.divergences = 0
        self._model = model
        self._layout = layout
        self._facts = dict(facts)
        self._salts: dict[str, bytes] = {}
        self._index = BlockIndex()
        self._order = EvictionOrder()
        self._offers = Offers()
        self._parked = ParkedRows()
        self._pinned: OrderedDict[Node, None] = OrderedDict()
        self._kept_bytes = self.pinned_bytes = 0
        self._unsettled: list[mx.array] = []

    def __len__(self) -> int:
        return self._index.leaves

    @property
    def held_bytes(self) -> int:
        """What all but parked rows take."""
        return self._kept_bytes + self._offers.bytes

    @property
    def parked_bytes(self) -> int:
        """What parked rows take, beside `held_bytes`."""
        return self._parked.bytes

    @property
    def cuts_anywhere(self) -> bool:
        """Whether any beginning of what is kept can be used, and not only where a state was kept."""
        return self._layout is not None and self._layout.is_cut_anywhere

    @property
    def keeps_states(self) -> bool:
        """Whether what is kept can be used only where a state was kept."""
        return self._layout is not None and not self._layout.is_cut_anywhere

    def may_keep(self, row: Row) -> bool:
        """Whether there is room for all that `row` reads."""
        if self._layout is None:
            return False
        return (
            row.read_tokens * (self._layout.token_bytes + _TOKEN_BYTES) <= self.bytes_max - self._parked.bytes
        )

    def numbers(self) -> dict[str, int]:
        """For `status`."""
        refused = {f"refused_{reason.replace(' ', '_')}": count for reason, count in self.refused.items()}
        return {
            "blocks": len(self._index),
            "pinned_bytes": self.pinned_bytes,
            "restored_tokens": self.restored_tokens,
            "divergences": self.divergences,
            **refused,
        }

    def salt(self, scope: str) -> bytes:
        """What the keys of prompts in this scope are chained to."""
        if scope not in self._salts:
            if len(self._salts) > 4096:
                self._salts.clear()
            self._salts[scope] = salt_of(**self._facts, scope=scope)
        return self._salts[scope]

    # --- what is there ---

    def fetch(self, row: Row) -> Hit:
        """Caches that hold the longest beginning of what `row` has to read, and how long it is.

        It is always shorter than that: a row needs one token to start from.
        """
        match = self._match(row)
        nodes, length = self._usable(match)
        hit = Hit(0, None, match.tokens, match.differs)
        if self._layout is not None and length >= PREFIX_TOKENS_MIN:
            hit = hit._replace(tokens=length, caches=self._build(nodes, length))
            for node in nodes:
                if node is nodes[-1] or node.block.checkpoint is None:
                    self._order.use(node)
        if row.is_pinned and match.nodes and match.tokens == len(row.ids) - 1:
            self._pin(match.nodes[-1])
        return hit

    def longest(self, row: Row) -> int:
        """How many tokens `fetch` would give."""
        length = self._usable(self._match(row))[1]
        return length if length >= PREFIX_TOKENS_MIN else 0

    def awaited(self, row: Row) -> int:
        """How many tokens `fetch` would give if all that is on offer were accepted."""
        return self._offers.awaited(row.ids[:-1], self.salt(row.scope))

    def wants(self, row: Row) -> bool:
        """Whether what `row` holds now would tell anything new."""
        if self.bytes_max <= 0 or row.held < PREFIX_TOKENS_MIN:
            return False
        if self._layout is None:
            self.refused["not possible with this model"] += 1
            return False
        if self.cuts_anywhere:
            return self._match(row, row.held).tokens < row.held
        node = self._index.get(self._keys(row, row.held)[-1])
        return node is None or node.block.checkpoint is None

    def find(self, key: bytes) -> StoredBlock | None:
        """The block with this key, if it is kept. May be called from any thread."""
        node = self._index.get(key)
        return None if node is None else node.block

    # --- what comes ---

    def offer(self, row: Row, caches: Caches, place: kv.Place | None = None) -> Offer | None:
        """Hold a copy of what `row` holds and is not kept yet, until `accept` or `withdraw`. `settle` must follow.

        `caches` are those of the row alone, or of a batch in which it is at `place`. None if there is no room.
        """
        assert self._layout is not None, "nothing is wanted"
        keys = self._keys(row, row.held)
        begin = self._offered(row, keys)
        end = self._end_within(begin, row)
        if end <= begin and (self.cuts_anywhere or end < row.held):
            self.refused["too long"] += 1
            return None
        ends = [*range(whole(begin) + BLOCK_TOKENS, end, BLOCK_TOKENS), end] if end > begin else []
        parts = self._layout.take(caches, begin, ends, place)
        ids = np.asarray(row.tokens[:end], np.uint32)
        blocks: list[StoredBlock] = []
        for arrays, stop in zip(parts, ends, strict=True):
            start = blocks[-1].end if blocks else begin
            number = start // BLOCK_TOKENS
            parent = keys[number - 1] if number else self.salt(row.scope)
            blocks.append(StoredBlock(keys[number], parent, start, ids[start:stop], tuple(arrays)))
        offer = Offer(
            row=row.id,
            tokens=ids,
            salt=self.salt(row.scope),
            key=blocks[-1].key if blocks else keys[-1],
            blocks=blocks,
            checkpoint=self._checkpoint(caches, place),
            is_pinned=row.is_pinned and end == len(row.ids) - 1,
        )
        if offer.bytes > self.bytes_max - self._parked.bytes:
            self.refused["too long"] += 1
            return None
        self._unsettled += offer.arrays()
        self._offers.add(offer)
        self._evict()
        return offer

    def accept(self, offer: Offer) -> None:
        """A finite logit was made of what is on offer: let others have it."""
        if not self._offers.remove(offer):
            return
        for block in offer.blocks:
            self._add(block)
        node = self._index.get(offer.key)
        if node is None:
            # What came before it has gone meanwhile, or a longer block has come.
            return
        if offer.checkpoint is not None and node.block.checkpoint is None:
            self._add_state(node, offer.checkpoint)
            self._order.use(node)
        if offer.is_pinned:
            self._pin(node)
        self._evict()

    def withdraw(self, offer: Offer) -> bool:
        """What is on offer is no number: drop it; returns whether it was still held."""
        was_held = self._offers.remove(offer)
        self.refused["not finite"] += was_held
        return was_held

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

    def store(self, row: Row, caches: Caches, place: kv.Place | None = None) -> None:
        """Keep what `row` holds, which is known to be good. `settle` must follow."""
        offer = self.offer(row, caches, place)
        if offer is not None:
            self.accept(offer)

    def insert_blocks(self, blocks: Sequence[StoredBlock]) -> int:
        """Keep blocks from elsewhere that are known to be good, each the parent of the next, as far as there is room.

        Returns how many tokens of their prompt are kept now.
        """
        room = self.bytes_max - self._parked.bytes - self._offers.bytes - self.pinned_bytes
        held: list[Node] = []
        for block in blocks:
            node = self._index.get(block.key)
            room -= block.bytes
            if room < 0:
                break
            if node is None:
                node = self._add(block)
                if node is None:
                    break
                self.restored_tokens += len(block.tokens)
            elif block.checkpoint is not None and node.block.checkpoint is None:
                self._add_state(node, block.checkpoint)
            # Until all are here, none of them may go.
            self._hold(node)
            held.append(node)
        self._evict()
        for node in held:
            self._release(node)
        return held[-1].block.end if held else 0

    # --- rows that will come back ---

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
        if parked is not None and parked.made is not None and self.wants(parked.row):
            self.store(parked.row, parked.caches)

    # --- room ---

    def settle(self) -> None:
        """Start to compute what was stored, so that no block keeps a whole batch alive, or waits for another thread."""
        if self._unsettled:
            kv.start(self._unsettled)
            self._unsettled = []

    def limit(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on, and no more than at first; returns the bytes dropped."""
        before = self.held_bytes + self._parked.bytes
        self.bytes_max = min(bytes_max, self._bytes_most)
        self._evict()
        return before - self.held_bytes - self._parked.bytes

    def clear(self) -> None:
        """Drop everything."""
        if self.tier is not None:
            self.tier.on_clear()
        self._index.clear()
        self._order.clear()
        self._offers.clear()
        self._parked.clear()
        self._pinned.clear()
        self._unsettled = []
        self._kept_bytes = self.pinned_bytes = 0

    def _evict(self) -> None:
        going: list[StoredBlock] = []
        while self.held_bytes + self._parked.bytes > self.bytes_max:
            node = self._order.next()
            if node is not None:
                self._drop(node, going)
            elif (offer := self._offers.oldest()) is not None:
                self._offers.remove(offer)
                self.refused["no room"] += 1
            elif self._pinned:
                self._unpin(next(iter(self._pinned)))
            else:
                break
        self._parked.trim(self.bytes_max)
        if going and self.tier is not None:
            for run in _runs(going):
                self.tier.on_evict(run)

    def _drop(self, node: Node, going: list[StoredBlock]) -> None:
        going.append(node.block)
        if not node.is_leaf:
            self._exchange(node, replace(node.block, checkpoint=None))
            return
        self._remove(node)
        parent = node.parent
        # Where nothing is cut, nobody can go on from a block without a state.
        while parent is not None and parent.is_leaf and not (parent.pins or self._is_of_use(parent)):
            going.append(parent.block)
            self._remove(parent)
            parent = parent.parent
        if parent is not None:
            self._order.enter(parent)

    def _is_of_use(self, leaf: Node) -> bool:
        return self.cuts_anywhere or leaf.block.checkpoint is not None

    def _remove(self, leaf: Node) -> None:
        self._kept_bytes -= leaf.block.bytes
        self._index.remove(leaf)

    def _add_state(self, node: Node, checkpoint: Checkpoint) -> None:
        self._exchange(node, replace(node.block, checkpoint=checkpoint))
        if self.tier is not None:
            self.tier.on_add(node.block)

    def _exchange(self, node: Node, block: StoredBlock) -> None:
        change = block.bytes - node.block.bytes
        node.block = block
        self._kept_bytes += change
        self.pinned_bytes += change if node.pins else 0

    def _add(self, block: StoredBlock) -> Node | None:
        """Keep a block. None if it is kept already, or there is nothing to go on from."""
        is_whole = len(block.tokens) == BLOCK_TOKENS
        if self.cuts_anywhere and not is_whole and self._index.covers(block):
            return None
        node = self._index.add(block)
        if node is None:
            return None
        self._kept_bytes += block.bytes
        self._order.use(node)
        if self.tier is not None:
            self.tier.on_add(block)
        if self.cuts_anywhere:
            for other in self._index.stand_ins(node):
                if not other.pins:
                    self._remove(other)
        return node

    def _pin(self, node: Node) -> None:
        """Keep a prompt as long as there is room for it beside rows; half the store at most is kept so."""
        if node in self._pinned:
            self._pinned.move_to_end(node)
            return
        room = int(self.bytes_max * _PINNED_SHARE)
        if sum(each.block.bytes for each in node.path()) > room:
            self.refused["too long to pin"] += 1
            return
        while self._pinned and self.pinned_bytes + _unpinned_bytes(node) > room:
            self._unpin(next(iter(self._pinned)))
        self._pinned[node] = None
        for each in node.path():
            self._hold(each)

    def _unpin(self, node: Node) -> None:
        del self._pinned[node]
        for each in node.path():
            self._release(each)

    def _hold(self, node: Node) -> None:
        node.pins += 1
        self.pinned_bytes += node.block.bytes if node.pins == 1 else 0

    def _release(self, node: Node) -> None:
        node.pins -= 1
        if not node.pins:
            self.pinned_bytes -= node.block.bytes
            self._order.enter(node)

    # --- how much of a row ---

    def _keys(self, row: Row, tokens: int) -> list[bytes]:
        """Of the whole blocks of a row's first `tokens`, then of what is left of them."""
        count = tokens // BLOCK_TOKENS
        salt = self.salt(row.scope)
        if len(row.keys) < count:
            row.keys = block_keys(row.tokens[: count * BLOCK_TOKENS], salt, row.keys)
        keys = row.keys[:count]
        rest = row.tokens[count * BLOCK_TOKENS : tokens]
        return [*keys, chained(keys[-1] if keys else salt, rest)] if rest else keys

    def _match(self, row: Row, tokens: int | None = None) -> Match:
        count = len(row.ids) - 1 if tokens is None else tokens
        ids = row.ids if count <= len(row.ids) else np.asarray(row.tokens[:count], np.uint32)
        keys = self._keys(row, whole(count))
        return self._index.match(keys, ids[:count], self.salt(row.scope))

    def _usable(self, match: Match) -> tuple[list[Node], int]:
        """The blocks of a match that can be used, and how many tokens they give."""
        if self.cuts_anywhere:
            return match.nodes, match.tokens
        nodes = list(match.whole)
        if match.short is not None:
            nodes.append(match.short)
        while nodes and nodes[-1].block.checkpoint is None:
            nodes.pop()
        return nodes, nodes[-1].block.end if nodes else 0

    def _build(self, nodes: Sequence[Node], tokens: int) -> Caches:
        assert self._layout is not None
        parts = [node.block.arrays for node in nodes]
        last = nodes[-1].block
        if tokens < last.end:
            parts[-1] = tuple(array[..., : tokens - last.start, :] for array in last.arrays)
        return self._layout.build(self._model, parts, tokens, last.checkpoint)

    def _offered(self, row: Row, keys: Sequence[bytes]) -> int:
        """How many tokens of a row, in whole blocks, are kept or on offer by itself."""
        kept = 0
        for key in keys:
            if self._index.get(key) is None:
                break
            kept += BLOCK_TOKENS
        kept = min(kept, row.held)
        return max(kept, whole(self._offers.tokens_of(row.id)))

    def _end_within(self, begin: int, row: Row) -> int:
        """How much there is room for of what a row holds, `begin` tokens and more. A state fits whole or not at all."""
        assert self._layout is not None
        tokens = int((self.bytes_max - self._parked.bytes) // (self._layout.token_bytes + _TOKEN_BYTES))
        if row.held <= tokens:
            return row.held
        return max(begin, whole(tokens)) if self.cuts_anywhere else begin

    def _checkpoint(self, caches: Caches, place: kv.Place | None) -> Checkpoint | None:
        assert self._layout is not None
        state = self._layout.take_state(caches, place)
        return None if state is None else Checkpoint(state.form, state.arrays)


def _unpinned_bytes(node: Node) -> int:
    return sum(each.block.bytes for each in node.path() if not each.pins)


def _runs(blocks: Sequence[StoredBlock]) -> list[list[StoredBlock]]:
    """Blocks that went one after the other, as runs in which each is the parent of the next."""
    runs: list[list[StoredBlock]] = []
    for block in reversed(blocks):
        if runs and runs[-1][-1].key == block.parent_key:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
