"""Kept blocks that may not go: of prompts that were pinned, and those that somebody awaits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from zmqengine.engine.prefix_cache.eviction import EvictionOrder
from zmqengine.engine.prefix_cache.index import Node


class Staying:
    """Takes blocks out of the `order` in which others go, and puts them back. `bytes` is what all of them take."""

    def __init__(self, order: EvictionOrder) -> None:
        self.bytes = self.pinned_bytes = 0
        self._order = order
        self._pinned: OrderedDict[Node, None] = OrderedDict()
        self._awaited: OrderedDict[Hashable, list[Node]] = OrderedDict()

    def pin(self, node: Node, room: int) -> bool:
        """Keep a prompt, within `room` for all that are pinned; the one pinned longest ago is no longer, if needed."""
        if node in self._pinned:
            self._pinned.move_to_end(node)
            return True
        path = node.path()
        if sum(each.block.bytes for each in path) > room:
            return False
        while self._pinned and self.pinned_bytes + _unpinned_bytes(path) > room:
            self._unpin_oldest()
        self._pinned[node] = None
        for each in path:
            self._change(each, pins=1)
        return True

    def hold(self, nodes: Iterable[Node], awaited_by: Hashable) -> None:
        """Keep blocks until `release`."""
        held = self._awaited.setdefault(awaited_by, [])
        for node in nodes:
            self._change(node, awaiting=1)
            held.append(node)

    def release(self, awaited_by: Hashable) -> None:
        """Nothing is awaited by this one any more, if anything was."""
        for node in self._awaited.pop(awaited_by, ()):
            self._change(node, awaiting=-1)

    def let_go(self) -> bool:
        """There is no room: give up what was awaited first, or else pinned; returns whether there was anything."""
        if self._awaited:
            self.release(next(iter(self._awaited)))
        elif self._pinned:
            self._unpin_oldest()
        else:
            return False
        return True

    def grew(self, node: Node, bytes_: int) -> None:
        """A kept block takes so much more, or less, than before."""
        self.bytes += bytes_ if node.stays else 0
        self.pinned_bytes += bytes_ if node.pins else 0

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._pinned.clear()
        self._awaited.clear()
        self.bytes = self.pinned_bytes = 0

    def _unpin_oldest(self) -> None:
        node, _ = self._pinned.popitem(last=False)
        for each in node.path():
            self._change(each, pins=-1)

    def _change(self, node: Node, *, pins: int = 0, awaiting: int = 0) -> None:
        self.grew(node, -node.block.bytes)
        node.pins += pins
        node.awaiting += awaiting
        self.grew(node, node.block.bytes)
        if not node.stays:
            self._order.enter(node)


def _unpinned_bytes(path: Iterable[Node]) -> int:
    return sum(each.block.bytes for each in path if not each.pins)
