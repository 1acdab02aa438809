"""The prefix cache in memory, as the rest of the engine calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.block_layout import BlockLayout, all_finite
from zmqengine.engine.prefix_cache.block import (
    BLOCK_TOKENS,
    PREFIX_TOKENS_MIN,
    Beginning,
    StoredBlock,
    block_keys,
    chained,
    salt_of,
    whole,
)
from zmqengine.engine.prefix_cache.block_pool import BlockPool
from zmqengine.engine.prefix_cache.index import Match, Node
from zmqengine.engine.prefix_cache.offers import Offer, arrays_of, make_offer
from zmqengine.engine.prefix_cache.parked_rows import ParkedRow, ParkedRows
from zmqengine.engine.row import Row

BUFFERS_MAX = 300_000
"""Arrays of all blocks. Metal takes 499,000 buffers of a process, freed ones that MLX keeps included
(github.com/ml-explore/mlx/issues/1718, 3512)."""
# Maximum share of the prefix cache that pinned prompts may hold.
_PINNED_SHARE = 0.5
# Scopes whose salt is remembered; that of another one is computed again.
_SCOPES_MAX = 4096
_TOKEN_BYTES = 4


class Hit(NamedTuple):
    """A new cache of one row that holds its first `tokens`. `known` of its tokens are cached, usable or not.

    `differs`: cached tokens that differ from the prompt's after `known`, if there are any.
    """

    tokens: int
    cache: Any
    known: int
    differs: np.ndarray | None


class Prefix(NamedTuple):
    """Tokens of a row that are `cached`, and those `offered`: cached if all offers were accepted.

    `version` of the cache for which this holds.
    """

    version: int
    cached: int
    offered: int


class PrefixCache:
    """Blocks of prompts and outputs, blocks on offer and caches of preempted rows, in `bytes_max` together.

    Without a `layout` only preempted rows are kept. `restore` is that of the runner. `facts` and the scope of a row
    make the salt of its chain. Memory is freed in this order: evictable blocks by worth, offers, blocks held for
    requests, pinned blocks, preempted rows.
    `counts`: events since the start, for `status`.
    """

    def __init__(
        self,
        layout: BlockLayout | None,
        restore: Callable[..., Any],
        bytes_max: int,
        facts: Mapping[str, str],
    ) -> None:
        self.bytes_max = self._bytes_most = bytes_max
        self.pool = BlockPool(cut_anywhere=layout is not None and layout.is_cut_anywhere)
        self.parked = ParkedRows()
        self.counts = Counter(memory_hit_tokens=0, disk_hit_tokens=0, restored_tokens=0, divergences=0)
        self.salt: Callable[[str], bytes] = lru_cache(_SCOPES_MAX)(
            lambda scope: salt_of(**facts, scope=scope)
        )
        """Root of the chain for prompts in a scope."""
        self._restore = restore
        self._layout = layout
        # The oldest first.
        self._offers: dict[Offer, None] = {}
        # Counts changes of `_offers`.
        self._offers_version = 0
        self._unsettled: list[Offer] = []
        # Those whose copies the device may not have computed yet.
        self._in_doubt: dict[Offer, None] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all blocks, those on offer included."""
        return self.pool.bytes + sum(offer.bytes for offer in self._offers)

    @property
    def keeps_states(self) -> bool:
        """Whether cached prefixes are usable at checkpoints only."""
        return self._layout is not None and not self._layout.is_cut_anywhere

    def may_keep(self, row: Row) -> bool:
        """Whether all tokens of `row` may be kept, and fit."""
        return (
            self._layout is not None
            and row.is_cacheable
            and len(row.tokens) <= self._tokens_max(self._layout)
        )

    # --- lookup ---

    def prefix(self, row: Row) -> Prefix:
        """Tokens of a row that `fetch` would give."""
        version = self.pool.version + self._offers_version
        known: Prefix | None = row.prefix
        if known is None or known.version != version:
            length = self.pool.usable(self._match(row, row.first_forced - 1))[1]
            length = length if length >= PREFIX_TOKENS_MIN else 0
            row.prefix = known = Prefix(version, length, self._longest_offered(row))
        return known

    def _longest_offered(self, row: Row) -> int:
        salt, longest = self.salt(row.scope), 0
        beginning = self.beginning(row, row.first_forced - 1)
        for offer in self._offers:
            if offer.salt == salt and offer.tokens > longest:
                shared = offer.beginning.shared(beginning)
                if offer.checkpoint is None or shared == offer.tokens:
                    longest = max(longest, shared)
        return longest

    def beginning(self, row: Row, tokens: int) -> Beginning:
        """The first `tokens` of a row, of its prompt and `emitted` at most."""
        return Beginning(row.ids[:tokens], self._keys(row, whole(tokens)))

    def fetch(self, row: Row) -> Hit:
        """A cache of the longest cached prefix of a row, without the token whose logits are the first it needs."""
        match = self._match(row, row.first_forced - 1)
        nodes, length = self.pool.usable(match)
        hit = Hit(0, None, match.tokens, match.differs)
        if self._layout is not None and length >= PREFIX_TOKENS_MIN:
            parts = [node.block.arrays for node in nodes]
            cache = self._restore(parts, length, nodes[-1].block.checkpoint, len(row.tokens))
            hit = hit._replace(tokens=length, cache=cache)
            self.pool.use(nodes)
            self._count_hit(nodes, length)
        if row.is_pinned and match.nodes and match.tokens == row.first_forced - 1:
            self._pin(match.nodes[-1])
        return hit

    def wants(self, row: Row) -> bool:
        """Whether the caches of `row` hold something that is not cached yet."""
        if not row.is_cacheable or self.bytes_max <= 0 or row.computed_tokens < PREFIX_TOKENS_MIN:
            return False
        if self._is_cached(row):
            return False
        self.counts["refused_not_possible_with_this_model"] += self._layout is None
        return self._layout is not None

    # --- offer -> valid ---

    def offer(self, row: Row) -> Offer | None:
        """Copy the tokens of `row` that are not cached, for `accept` or `withdraw`; None if they do not fit.

        `settle` must follow before the row's cache is written again.
        """
        layout = self._layout
        assert layout is not None, "`wants` was not asked"
        keys = self._keys(row, row.computed_tokens)
        cached = next((at for at, key in enumerate(keys) if self.pool.index.get(key) is None), len(keys))
        offered = max((offer.tokens for offer in self._offers if offer.row == row.id), default=0)
        begin = max(min(row.computed_tokens, cached * BLOCK_TOKENS), whole(offered))
        end = (
            row.computed_tokens
            if self.may_keep(row)
            else min(row.computed_tokens, max(begin, whole(self._tokens_max(layout))))
        )
        # A checkpoint cannot be cut to fit.
        if end < row.computed_tokens and (end == begin or self.keeps_states):
            self.counts["refused_too_long"] += 1
            return None
        offer = make_offer(row, begin, end, [self.salt(row.scope), *keys], layout)
        if offer.bytes > self.bytes_max - self.parked.bytes:
            self.counts["refused_too_long"] += 1
            return None
        self._unsettled.append(offer)
        self._in_doubt[offer] = None
        self._offers[offer] = None
        self._offers_version += 1
        self._make_room()
        return offer

    def accept(self, offer: Offer | None) -> None:
        """Make the blocks of an offer valid: a finite logit was computed from them."""
        if offer is None or not self._drop_offer(offer):
            return
        for block in offer.blocks:
            self.pool.add(block)
        node = self.pool.index.get(offer.key)
        if node is None:
            # Its parent was evicted since, or a longer block was added.
            return
        if offer.checkpoint is not None and node.block.checkpoint is None:
            self.pool.add_checkpoint(node, offer.checkpoint)
        if offer.is_pinned:
            self._pin(node)
        self._make_room()

    def withdraw(self, offer: Offer) -> None:
        """Drop an offer whose logits are not finite."""
        self.counts["refused_not_finite"] += self._drop_offer(offer)

    def prove(self, row: Row) -> None:
        """Accept the finite offers of a row that ends before its first logit. Waits for the device."""
        is_valid = True
        for offer in row.offers:
            # Blocks after an invalid one were computed from it.
            is_valid = is_valid and offer in self._offers and all_finite(offer.arrays())
            if is_valid:
                self.accept(offer)
            else:
                self.withdraw(offer)
        row.offers = []

    # --- blocks from a lower tier ---

    def insert_blocks(self, blocks: Sequence[StoredBlock], awaited_by: Hashable) -> int:
        """Add valid blocks, each the parent of the next, as far as evictable blocks make room, and hold them until
        `release`; returns how many tokens of their prompt are cached."""
        pool, end = self.pool, 0
        if (parent := pool.index.get(blocks[0].parent_key)) is not None:
            pool.hold(parent, awaited_by)
        for block in blocks:
            node = pool.index.get(block.key)
            if node is not None:
                # Held before blocks are evicted: its own checkpoint must not evict it.
                pool.hold(node, awaited_by)
            checkpoint = None if node is None or node.block.checkpoint is not None else block.checkpoint
            missing = block.bytes if node is None else 0 if checkpoint is None else checkpoint.bytes
            if not self._evict_for(missing):
                break
            if node is None:
                node = pool.add(block)
                if node is None:
                    break
                pool.hold(node, awaited_by)
            elif checkpoint is not None:
                pool.add_checkpoint(node, checkpoint)
            if missing:
                node.is_restored = True
                self.counts["restored_tokens"] += len(block.tokens)
            end = block.end
        pool.tell_evicted()
        return end

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks held for a request, used or not."""
        self.pool.release(awaited_by)

    # --- preempted rows ---

    def park(self, parked: ParkedRow) -> int:
        """Keep a row until it resumes; returns how many tokens it keeps."""
        if parked.bytes > self.bytes_max:
            parked.drop()
            return 0
        self.parked.add(parked)
        self._make_room()
        return parked.reusable

    def forget(self, row_id: int) -> None:
        """Turn a parked row that will not resume into blocks. The caller must `settle` afterwards."""
        parked = self.parked.pop(row_id)
        if parked is None:
            return
        # Without a logit, its cache may hold NaN.
        if parked.is_finite and self.wants(parked.row):
            self.accept(self.offer(parked.row))
        parked.drop()

    # --- memory ---

    def settle(self) -> list[Offer]:
        """Start computing the copies, so that no block keeps other arrays alive, or is lazy in another thread; returns
        them, for `note_computed`."""
        offers, self._unsettled = self._unsettled, []
        if offers:
            mx.async_eval(arrays_of(offers))  # type: ignore[no-untyped-call]
        return offers

    def note_computed(self, offers: Sequence[Offer]) -> None:
        """Note that the device has computed these copies: no later failure of it concerns them."""
        for offer in offers:
            self._in_doubt.pop(offer, None)

    def limit(self, bytes_max: int) -> int:
        """Lower or raise `bytes_max`, up to the first one; returns the bytes freed."""
        before = self.byte_count + self.parked.bytes
        self.bytes_max = min(bytes_max, self._bytes_most)
        self._make_room()
        return before - self.byte_count - self.parked.bytes

    def clear(self) -> None:
        """Drop everything."""
        self.pool.clear()
        self._forget_rows()

    def drop_doubtful(self) -> None:
        """Drop all that a failed step may have left without numbers: parked rows, offers, and blocks whose copies are
        not known to be computed."""
        doubtful = []
        for offer in self._in_doubt:
            doubtful += [block.key for block in offer.blocks if self._holds(block.key, block.arrays)]
            if offer.checkpoint is not None and self._holds(offer.key, offer.checkpoint):
                doubtful.append(offer.key)
        self.pool.drop(doubtful)
        self._forget_rows()

    def _holds(self, key: bytes, part: object) -> bool:
        """Whether the block of `key` has these very arrays, or this checkpoint."""
        node = self.pool.index.get(key)
        return node is not None and (node.block.arrays is part or node.block.checkpoint is part)

    def _forget_rows(self) -> None:
        self._offers.clear()
        self._offers_version += 1
        self.parked.clear()
        self._unsettled = []
        self._in_doubt.clear()

    def numbers(self) -> dict[str, int]:
        """Figures for `status`."""
        held = {"blocks": len(self.pool.index), "buffers": self.pool.buffers}
        return {**held, "pinned_bytes": self.pool.pinned_bytes, **self.counts}

    def _make_room(self) -> None:
        while not self._evict_for(0):
            if self._offers:
                self._drop_offer(next(iter(self._offers)))
                self.counts["refused_no_room"] += 1
            elif not self.pool.release_oldest():
                break
        self.parked.trim(self.bytes_max)
        self.pool.tell_evicted()

    def _evict_for(self, bytes_: int) -> bool:
        """Evict blocks until `bytes_` more fit; False if they do not with no evictable block left."""
        fixed = self.byte_count - self.pool.bytes + self.parked.bytes + bytes_
        while self.pool.bytes + fixed > self.bytes_max or self.pool.buffers > BUFFERS_MAX:
            if not self.pool.evict():
                return False
        return True

    def _tokens_max(self, layout: BlockLayout) -> int:
        return max(0, self.bytes_max - self.parked.bytes) // (layout.token_bytes + _TOKEN_BYTES)

    def _drop_offer(self, offer: Offer) -> bool:
        is_held = offer in self._offers
        self._offers.pop(offer, None)
        self._offers_version += is_held
        return is_held

    def _pin(self, node: Node) -> None:
        if not self.pool.pin(node, int(self.bytes_max * _PINNED_SHARE)):
            self.counts["refused_too_long_to_pin"] += 1

    def _count_hit(self, nodes: Sequence[Node], length: int) -> None:
        for node in nodes:
            tier = "disk" if node.is_restored else "memory"
            self.counts[f"{tier}_hit_tokens"] += min(node.block.end, length) - node.block.start
            node.is_restored = False

    def _match(self, row: Row, tokens: int) -> Match:
        return self.pool.index.match(self._keys(row, whole(tokens)), row.named(tokens), self.salt(row.scope))

    def _is_cached(self, row: Row) -> bool:
        if self.pool.cut_anywhere:
            return self._match(row, row.computed_tokens).tokens == row.computed_tokens
        node = self.pool.index.get(self._keys(row, row.computed_tokens)[-1])
        return node is not None and node.block.checkpoint is not None

    def _keys(self, row: Row, tokens: int) -> list[bytes]:
        """Keys of the whole blocks in a row's first `tokens`, then of the short block after them, if there is one."""
        count = tokens // BLOCK_TOKENS
        salt = self.salt(row.scope)
        if len(row.keys) < count:
            row.keys = block_keys(row.named(count * BLOCK_TOKENS), salt, row.keys)
        keys = row.keys[:count]
        rest = row.named(tokens)[count * BLOCK_TOKENS :]
        return [*keys, chained(keys[-1] if keys else salt, rest)] if len(rest) else keys
