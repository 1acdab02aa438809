"""Eviction order of blocks: the block of least worth goes first.

Greedy-dual by size (Cao and Irani, 1997). When a block is used, its worth becomes the cost of computing it again, per
byte, plus the worth of the last block evicted. Of two blocks the less recently used one goes first, unless it would
cost much more to compute again.
"""

from __future__ import annotations

import heapq
from itertools import count

from zmqengine.engine.prefix_cache.index import Node

# At about this position a token costs twice the first one: attention takes as long as the weights.
_ATTENTION_TOKENS = 16_384


class EvictionOrder:
    """Evictable blocks, as a heap with stale entries: leaves, and inner blocks that have a checkpoint to lose."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []
        self._ticks = count(1)
        self._floor = 0.0
        self._stale_at = 1024

    def use(self, node: Node) -> None:
        """Note that a block was added or hit."""
        node.worth = self._floor + _cost(node)
        node.tick = next(self._ticks)
        self.enter(node)

    def enter(self, node: Node) -> None:
        """Make a block evictable at the worth of its last use, if nothing holds it."""
        if not node.holds and (node.is_leaf or node.block.checkpoint is not None):
            heapq.heappush(self._heap, (node.worth, node.tick, next(self._ticks), node))
            if len(self._heap) > self._stale_at:
                self._drop_stale()

    def next(self) -> Node | None:
        """Remove and return the block of least worth."""
        while self._heap:
            worth, tick, _, node = heapq.heappop(self._heap)
            if _is_due(node, tick):
                self._floor = max(self._floor, worth)
                return node
        return None

    def clear(self) -> None:
        """Forget all blocks."""
        self._heap.clear()

    def _drop_stale(self) -> None:
        due = {id(entry[3]): entry for entry in self._heap if _is_due(entry[3], entry[1])}
        self._heap = list(due.values())
        heapq.heapify(self._heap)
        self._stale_at = max(1024, 2 * len(self._heap))


def _is_due(node: Node, tick: int) -> bool:
    is_evictable = node.is_leaf or node.block.checkpoint is not None
    return node.is_kept and node.tick == tick and not node.holds and is_evictable


def _cost(node: Node) -> float:
    """Tokens to prefill again per byte, weighted by their position in the prompt."""
    block = node.block
    start, taken = block.start, block.bytes
    if block.checkpoint is not None:
        # Without this checkpoint, prefill would start from the one before.
        before = node.parent
        while before is not None and before.block.checkpoint is None:
            before = before.parent
        start = 0 if before is None else before.block.end
        taken = max(1, block.checkpoint.bytes)
    return (block.end - start) * (1 + block.end / _ATTENTION_TOKENS) / taken
