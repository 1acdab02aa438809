"""Blocks that nobody gets before a finite logit was made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.prefix_cache.block import Checkpoint, StoredBlock, total_bytes
from zmqengine.engine.prefix_cache.index import shared_tokens
from zmqengine.engine.prefix_cache.keys import BLOCK_TOKENS
from zmqengine.engine.row import Caches, Row


@dataclass(frozen=True, eq=False)
class Offer:
    """What `row` has read of `tokens` and was not kept: the last `blocks` of them, and the state after all of them.

    `key` is that of the last block, whether it is among them or kept already.
    """

    row: int
    tokens: np.ndarray
    salt: bytes
    key: bytes
    blocks: list[StoredBlock]
    checkpoint: Checkpoint | None
    is_pinned: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the offered blocks."""
        return total_bytes(self.blocks) + (self.checkpoint.bytes if self.checkpoint is not None else 0)

    def arrays(self) -> Iterator[Any]:
        """All of them, to be computed."""
        for block in self.blocks:
            yield from block.arrays
        if self.checkpoint is not None:
            yield from self.checkpoint.arrays


class Offers:
    """Offers of all rows, the oldest first."""

    def __init__(self) -> None:
        self._offers: dict[Offer, None] = {}
        self.bytes = 0

    def __contains__(self, offer: Offer) -> bool:
        return offer in self._offers

    def add(self, offer: Offer) -> None:
        """Hold it."""
        self._offers[offer] = None
        self.bytes += offer.bytes

    def remove(self, offer: Offer) -> bool:
        """Hold it no longer; returns whether it was held."""
        if offer not in self._offers:
            return False
        del self._offers[offer]
        self.bytes -= offer.bytes
        return True

    def oldest(self) -> Offer | None:
        """The one that goes first when there is no room."""
        return next(iter(self._offers), None)

    def tokens_of(self, row: int) -> int:
        """How many tokens are on offer by this row."""
        return max((len(offer.tokens) for offer in self._offers if offer.row == row), default=0)

    def awaited(self, tokens: np.ndarray, salt: bytes) -> int:
        """How many of `tokens` would be served if all offers were accepted."""
        longest = 0
        for offer in self._offers:
            if offer.salt == salt and len(offer.tokens) > longest:
                shared = shared_tokens(offer.tokens, tokens)
                if offer.checkpoint is None or shared == len(offer.tokens):
                    longest = max(longest, shared)
        return longest

    def clear(self) -> None:
        """Drop all."""
        self._offers.clear()
        self.bytes = 0


def make_offer(
    row: Row,
    begin: int,
    end: int,
    keys: Sequence[bytes],
    layout: kv.BlockLayout,
    source: Caches | kv.BatchRow,
) -> Offer:
    """Copy tokens `begin` to `end` of a row as blocks; `begin` starts a block, `keys[0]` is the salt."""
    first = begin // BLOCK_TOKENS
    starts = list(range(first * BLOCK_TOKENS, end, BLOCK_TOKENS)) if end > begin else []
    ends = [min(start + BLOCK_TOKENS, end) for start in starts]
    ids = np.asarray(row.tokens[:end], np.uint32)
    parts = layout.take(source, begin, ends)
    blocks = [
        StoredBlock(keys[number + 1], keys[number], start, ids[start:stop], tuple(arrays))
        for number, (start, stop, arrays) in enumerate(zip(starts, ends, parts, strict=True), first)
    ]
    state = layout.take_state(source)
    return Offer(
        row=row.id,
        tokens=ids,
        salt=keys[0],
        key=blocks[-1].key if blocks else keys[-1],
        blocks=blocks,
        checkpoint=None if state is None else Checkpoint(state.form, state.arrays),
        is_pinned=row.is_pinned and end == len(row.ids) - 1,
    )
