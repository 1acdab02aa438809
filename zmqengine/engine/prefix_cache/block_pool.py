"""Block pool: the blocks in memory, their bytes, and which of them may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, Checkpoint, StoredBlock
from zmqengine.engine.prefix_cache.eviction import EvictionOrder
from zmqengine.engine.prefix_cache.index import BlockIndex, Match, Node


class LowerTier:
    """A slower tier below memory. This one drops every block; `disk.tier.DiskTier` keeps them.

    Called by the actor only, so no method may wait.
    """

    def on_add(self, block: StoredBlock) -> None:
        """A block, or its checkpoint, was added to memory. Its arrays may not be computed yet."""

    def on_evict(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks, each the parent of the next, leave memory. Their arrays are computed."""

    def on_clear(self) -> None:
        """Memory was emptied, as its blocks may be invalid; `on_add` follows for those that are not."""


class BlockPool:
    """Blocks in memory. A block that is pinned or held for a waiting request is not evicted.

    Where caches are not `cut_anywhere`, a leaf is of use only with a checkpoint.
    """

    def __init__(self, *, cut_anywhere: bool) -> None:
        self.tier = LowerTier()
        self.cut_anywhere = cut_anywhere
        self.bytes = self.buffers = 0
        self.version = 0
        """Counts changes of blocks and checkpoints: a lookup gives the same while it stays."""
        self.index = BlockIndex()
        self._order = EvictionOrder()
        self._evicted: list[StoredBlock] = []
        # Last block of a pinned prompt -> its chain, and waiting request -> its blocks; the oldest first.
        self._pinned: OrderedDict[Node, list[Node]] = OrderedDict()
        self._awaited: dict[Hashable, list[Node]] = {}

    def usable(self, match: Match) -> tuple[list[Node], int]:
        """Blocks of a match from which caches can be built, and how many tokens they give."""
        if self.cut_anywhere:
            return match.nodes, match.tokens
        nodes = list(match.whole)
        if match.short is not None:
            nodes.append(match.short)
        while nodes and nodes[-1].block.checkpoint is None:
            nodes.pop()
        return nodes, nodes[-1].block.end if nodes else 0

    def use(self, nodes: Sequence[Node]) -> None:
        """Note a hit on these blocks. Of their checkpoints only the last one was used."""
        for node in nodes:
            if node is nodes[-1] or node.block.checkpoint is None:
                self._order.use(node)

    def add(self, block: StoredBlock) -> Node | None:
        """Add a valid block; None if its tokens are cached already or its parent is not."""
        if self.cut_anywhere and len(block.tokens) < BLOCK_TOKENS and self.index.covers(block):
            return None
        node = self.index.add(block)
        if node is None:
            return None
        self.version += 1
        self.bytes += block.bytes
        self.buffers += block.buffers
        self._order.use(node)
        self.tier.on_add(block)
        if self.cut_anywhere:
            for other in self.index.covered_by(node):
                if not other.holds:
                    self._remove(other)
        return node

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Add a checkpoint to a block without one."""
        self._replace(node, replace(node.block, checkpoint=checkpoint))
        self._order.use(node)
        self.tier.on_add(node.block)

    # --- eviction ---

    def evict(self) -> bool:
        """Evict the block, or the checkpoint, of least worth; False if none may be evicted."""
        node = self._order.next()
        if node is None:
            return False
        self._evicted.append(node.block)
        if not node.is_leaf:
            self._replace(node, replace(node.block, checkpoint=None))
            return True
        self._remove(node)
        parent = node.parent
        while parent is not None and parent.is_leaf and not (parent.holds or self._is_of_use(parent)):
            self._evicted.append(parent.block)
            self._remove(parent)
            parent = parent.parent
        if parent is not None:
            self._order.enter(parent)
        return True

    def tell_evicted(self) -> None:
        """Pass the blocks evicted since the last call to the lower tier."""
        for run in _runs(self._evicted):
            self.tier.on_evict(run)
        self._evicted = []

    def clear(self) -> None:
        """Drop everything."""
        self.tier.on_clear()
        self.index.clear()
        self._order.clear()
        self._pinned.clear()
        self._awaited.clear()
        self.version += 1
        self.bytes = self.buffers = 0

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drop blocks that may be invalid and those that follow them, held ones too."""
        lost = [node for key in keys if (node := self.index.get(key)) is not None]
        for node in lost:
            lost += self.index.following(node.block.key)
        if not lost:
            return
        dropped = set(lost)
        for last in [last for last, path in self._pinned.items() if not dropped.isdisjoint(path)]:
            self._release(self._pinned.pop(last))
        for request in [request for request, path in self._awaited.items() if not dropped.isdisjoint(path)]:
            self.release(request)
        for node in sorted(dropped, key=lambda node: node.block.end, reverse=True):
            self._remove(node)
            if node.parent is not None and node.parent not in dropped:
                self._order.enter(node.parent)
        self.tier.on_clear()
        for node in self.index:
            self.tier.on_add(node.block)

    # --- blocks that stay ---

    @property
    def pinned_bytes(self) -> int:
        return _bytes_of(self._pinned.values())

    def pin(self, node: Node, bytes_max: int) -> bool:
        """Pin a prompt by its last block; False if it is larger than `bytes_max`, the bound for all pinned prompts.

        The prompts pinned longest ago are unpinned to make room.
        """
        if node in self._pinned:
            self._pinned.move_to_end(node)
            return True
        path = node.path()
        if _bytes_of([path]) > bytes_max:
            return False
        while _bytes_of([*self._pinned.values(), path]) > bytes_max:
            self._release(self._pinned.popitem(last=False)[1])
        self._pinned[node] = path
        self._hold(path)
        return True

    def hold(self, node: Node, awaited_by: Hashable) -> None:
        """Hold a block for a waiting request until `release`."""
        self._awaited.setdefault(awaited_by, []).append(node)
        self._hold([node])

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks held for this request, if any are."""
        self._release(self._awaited.pop(awaited_by, ()))

    def release_oldest(self) -> bool:
        """Release the blocks held longest for a request, or else unpin the oldest prompt; False if there is none."""
        if self._awaited:
            self.release(next(iter(self._awaited)))
        elif self._pinned:
            self._release(self._pinned.popitem(last=False)[1])
        else:
            return False
        return True

    def _hold(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.holds += 1

    def _release(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.holds -= 1
            if not node.holds:
                self._order.enter(node)

    def _is_of_use(self, leaf: Node) -> bool:
        return self.cut_anywhere or leaf.block.checkpoint is not None

    def _remove(self, leaf: Node) -> None:
        self.version += 1
        self.bytes -= leaf.block.bytes
        self.buffers -= leaf.block.buffers
        self.index.remove(leaf)

    def _replace(self, node: Node, block: StoredBlock) -> None:
        self.version += 1
        self.bytes += block.bytes - node.block.bytes
        self.buffers += block.buffers - node.block.buffers
        node.block = block


def _bytes_of(paths: Iterable[Sequence[Node]]) -> int:
    """Bytes of the blocks in any of the chains; a shared one counts once."""
    return sum(node.block.bytes for node in {node for path in paths for node in path})


def _runs(blocks: Sequence[StoredBlock]) -> list[list[StoredBlock]]:
    """Blocks evicted leaf by leaf, as runs in which each is the parent of the next."""
    runs: list[list[StoredBlock]] = []
    for block in reversed(blocks):
        if runs and runs[-1][-1].key == block.parent_key:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
