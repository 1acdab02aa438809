"""The blocks that are kept, what they take, and which of them go when there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zmqengine.engine.prefix_cache.block import Checkpoint, StoredBlock
from zmqengine.engine.prefix_cache.eviction import EvictionOrder
from zmqengine.engine.prefix_cache.index import BlockIndex, Match, Node
from zmqengine.engine.prefix_cache.keys import BLOCK_TOKENS
from zmqengine.engine.prefix_cache.staying import Staying
from zmqengine.engine.prefix_cache.tier import Tier


class KeptBlocks:
    """Blocks as a tree: none without the one before it. What goes is told to the `tier` by `tell_evicted`.

    Where nothing is `cut_anywhere`, a block from which nothing goes on is kept only with a checkpoint.
    """

    def __init__(self, *, cut_anywhere: bool) -> None:
        self.tier: Tier | None = None
        self.cut_anywhere = cut_anywhere
        self.kept_bytes = 0
        self.index = BlockIndex()
        self._order = EvictionOrder()
        self.staying = Staying(self._order)
        self._going: list[StoredBlock] = []

    def find(self, key: bytes) -> StoredBlock | None:
        """The block with this key, if it is kept. May be called from any thread."""
        node = self.index.get(key)
        return None if node is None else node.block

    def holds(self, block: StoredBlock) -> bool:
        """Whether all that is in this block is kept."""
        kept = self.find(block.key)
        return kept is not None and (kept.checkpoint is not None or block.checkpoint is None)

    def usable(self, match: Match) -> tuple[list[Node], int]:
        """The blocks of a match that can be used, and how many tokens they give."""
        if self.cut_anywhere:
            return match.nodes, match.tokens
        nodes = list(match.whole)
        if match.short is not None:
            nodes.append(match.short)
        while nodes and nodes[-1].block.checkpoint is None:
            nodes.pop()
        return nodes, nodes[-1].block.end if nodes else 0

    def use(self, nodes: Sequence[Node]) -> None:
        """A prompt was served from these blocks. Of their states only the last one was used."""
        for node in nodes:
            if node is nodes[-1] or node.block.checkpoint is None:
                self._order.use(node)

    def add(self, block: StoredBlock) -> Node | None:
        """Keep a block. None if it is kept already, or there is nothing to go on from."""
        is_whole = len(block.tokens) == BLOCK_TOKENS
        if self.cut_anywhere and not is_whole and self.index.covers(block):
            return None
        node = self.index.add(block)
        if node is None:
            return None
        self.kept_bytes += block.bytes
        self._order.use(node)
        if self.tier is not None:
            self.tier.on_add(block)
        if self.cut_anywhere:
            for other in self.index.stand_ins(node):
                if not other.stays:
                    self._remove(other)
        return node

    def add_state(self, node: Node, checkpoint: Checkpoint) -> None:
        """Keep a state with a block that has none."""
        self._exchange(node, replace(node.block, checkpoint=checkpoint))
        self._order.use(node)
        if self.tier is not None:
            self.tier.on_add(node.block)

    def add_all(self, blocks: Sequence[StoredBlock], room: int) -> list[Node]:
        """Keep blocks, each the parent of the next, as far as they fit `room`; returns all of them that are kept."""
        nodes: list[Node] = []
        for block in blocks:
            node = self.index.get(block.key)
            room -= block.bytes
            if room < 0 or (node is None and (node := self.add(block)) is None):
                break
            if block.checkpoint is not None and node.block.checkpoint is None:
                self.add_state(node, block.checkpoint)
            nodes.append(node)
        return nodes

    # --- what goes ---

    def evict(self) -> bool:
        """Drop what is worth least; returns whether there was anything that may go."""
        node = self._order.next()
        if node is None:
            return False
        self._going.append(node.block)
        if not node.is_leaf:
            self._exchange(node, replace(node.block, checkpoint=None))
            return True
        self._remove(node)
        parent = node.parent
        # Where nothing is cut, nobody can go on from a block without a state.
        while parent is not None and parent.is_leaf and not (parent.stays or self._is_of_use(parent)):
            self._going.append(parent.block)
            self._remove(parent)
            parent = parent.parent
        if parent is not None:
            self._order.enter(parent)
        return True

    def tell_evicted(self) -> None:
        """Let the tier know what has gone since the last time."""
        if self._going and self.tier is not None:
            for run in _runs(self._going):
                self.tier.on_evict(run)
        self._going = []

    def clear(self) -> None:
        """Drop everything."""
        if self.tier is not None:
            self.tier.on_clear()
        self.index.clear()
        self._order.clear()
        self.staying.clear()
        self.kept_bytes = 0

    def _is_of_use(self, leaf: Node) -> bool:
        return self.cut_anywhere or leaf.block.checkpoint is not None

    def _remove(self, leaf: Node) -> None:
        self.kept_bytes -= leaf.block.bytes
        self.index.remove(leaf)

    def _exchange(self, node: Node, block: StoredBlock) -> None:
        change = block.bytes - node.block.bytes
        node.block = block
        self.kept_bytes += change
        self.staying.grew(node, change)


def _runs(blocks: Sequence[StoredBlock]) -> list[list[StoredBlock]]:
    """Blocks that went one after the other, as runs in which each is the parent of the next."""
    runs: list[list[StoredBlock]] = []
    for block in reversed(blocks):
        if runs and runs[-1][-1].key == block.parent_key:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
