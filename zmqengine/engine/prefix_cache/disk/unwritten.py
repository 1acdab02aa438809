"""Blocks on their way to disk: memory may have let them go, and no file has them yet."""

from __future__ import annotations

from collections.abc import Iterable

from zmqengine.engine.prefix_cache.disk.host_block import HostBlock


class Unwritten:
    """Blocks by key, from their copy to the host until they are written or given up. One thread adds, the one that
    writes removes, and any may look: each is one operation on a dict."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, HostBlock] = {}

    def find(self, key: bytes) -> HostBlock | None:
        """The block of this key."""
        return self._blocks.get(key)

    def following(self, parent_key: bytes) -> dict[bytes, int]:
        """The blocks after this one, and how many tokens they have."""
        blocks = tuple(self._blocks.values())
        return {block.key: len(block.tokens) for block in blocks if block.parent_key == parent_key}

    def add(self, block: HostBlock) -> None:
        """It will be written."""
        self._blocks[block.key] = block

    def remove(self, blocks: Iterable[HostBlock]) -> None:
        """They are written, or will not be. Another copy, with a state, may be on its way meanwhile."""
        for block in blocks:
            if self._blocks.get(block.key) is block:
                self._blocks.pop(block.key, None)

    def clear(self) -> None:
        """Nobody is to have them."""
        self._blocks.clear()
