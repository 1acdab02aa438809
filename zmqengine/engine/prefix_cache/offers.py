"""Blocks on offer: computed, but invisible to other rows until a finite logit was computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zmqengine.engine.kv.block_layout import BlockLayout
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, Beginning, Checkpoint, StoredBlock
from zmqengine.engine.row import Row


@dataclass(frozen=True, eq=False)
class Offer:
    """New blocks, the last ones of `beginning`, that row `row` computed, and the checkpoint after them.

    `key`: key of the last block of `beginning`, which may be cached already.
    """

    row: int
    beginning: Beginning
    salt: bytes
    key: bytes
    blocks: list[StoredBlock]
    checkpoint: Checkpoint | None
    is_pinned: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the beginning."""
        return len(self.beginning.tokens)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the blocks and the checkpoint."""
        taken = sum(block.bytes for block in self.blocks)
        return taken + (self.checkpoint.bytes if self.checkpoint is not None else 0)

    def arrays(self) -> list[Any]:
        """Arrays of the blocks and the checkpoint, not computed yet."""
        arrays = [array for block in self.blocks for array in block.arrays]
        return arrays if self.checkpoint is None else [*arrays, *self.checkpoint.arrays]


def arrays_of(offers: Sequence[Offer]) -> list[Any]:
    """Arrays of all offers."""
    return [array for offer in offers for array in offer.arrays()]


def make_offer(
    row: Row,
    begin: int,
    end: int,
    keys: Sequence[bytes],
    layout: BlockLayout,
) -> Offer:
    """Copy tokens `begin` to `end` of a row as blocks; `begin` starts a block, `keys[0]` is the salt."""
    first = begin // BLOCK_TOKENS
    starts = list(range(first * BLOCK_TOKENS, end, BLOCK_TOKENS)) if end > begin else []
    ends = [min(start + BLOCK_TOKENS, end) for start in starts]
    ids = row.named(end)
    parts = layout.take(row.cache, begin, ends)
    blocks = [
        StoredBlock(keys[number + 1], keys[number], start, ids[start:stop], tuple(arrays))
        for number, (start, stop, arrays) in enumerate(zip(starts, ends, parts, strict=True), first)
    ]
    state = layout.take_state(row.cache)
    return Offer(
        row=row.id,
        beginning=Beginning(ids, keys[1 : 1 + end // BLOCK_TOKENS]),
        salt=keys[0],
        key=blocks[-1].key if blocks else keys[-1],
        blocks=blocks,
        checkpoint=None if state is None else Checkpoint(state.form, state.arrays),
        is_pinned=row.is_pinned and end == len(row.ids) - 1,
    )
