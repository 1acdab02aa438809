"""Which block goes when there is no room: the one that is worth least.

Greedy-dual by size (Cao and Irani, 1997): what a block is worth when it is used is what it would cost to compute again
for each of its bytes, on top of what the last one was worth that had to go. So of two blocks the one that was used
longer ago goes, unless it would cost much more to have it back.
"""

from __future__ import annotations

import heapq
from itertools import count

from zmqengine.engine.prefix_cache.index import Node

# From about here on a token costs twice what the first one does: attention then takes as long as the weights.
_ATTENTION_TOKENS = 16_384


class EvictionOrder:
    """The blocks that may go: those from which nothing goes on, and states that were kept on the way."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []
        self._ticks = count(1)
        self._floor = 0.0
        self._stale_at = 1024

    def use(self, node: Node) -> None:
        """A block was used, or has come."""
        node.worth = self._floor + _cost(node)
        node.tick = next(self._ticks)
        self.enter(node)

    def enter(self, node: Node) -> None:
        """A block that was used before may go from now on."""
        if not node.stays and (node.is_leaf or node.block.checkpoint is not None):
            heapq.heappush(self._heap, (node.worth, node.tick, next(self._ticks), node))
            if len(self._heap) > self._stale_at:
                self._forget_stale()

    def next(self) -> Node | None:
        """Take out the one that is worth least."""
        while self._heap:
            worth, tick, _, node = heapq.heappop(self._heap)
            if _is_due(node, tick):
                self._floor = max(self._floor, worth)
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()

    def _forget_stale(self) -> None:
        self._heap = list(
            {id(entry[3]): entry for entry in self._heap if _is_due(entry[3], entry[1])}.values()
        )
        heapq.heapify(self._heap)
        self._stale_at = max(1024, 2 * len(self._heap))


def _is_due(node: Node, tick: int) -> bool:
    is_removable = node.is_leaf or node.block.checkpoint is not None
    return node.is_kept and node.tick == tick and not node.stays and is_removable


def _cost(node: Node) -> float:
    """Tokens to be read again for each byte, weighted by how much came before them."""
    block = node.block
    start, kept = block.start, block.bytes
    if block.checkpoint is not None:
        # Without it one would go on from the state before.
        before = node.parent
        while before is not None and before.block.checkpoint is None:
            before = before.parent
        start = 0 if before is None else before.block.end
        kept = max(1, block.checkpoint.bytes)
    return (block.end - start) * (1 + block.end / _ATTENTION_TOKENS) / kept
