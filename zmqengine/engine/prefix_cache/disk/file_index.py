"""Index of block files: which block is in which file."""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import NamedTuple

from zmqengine.engine.prefix_cache.disk.block_file import BlockHeader, HostBlock


class BlockLocation(NamedTuple):
    """Position of a block in a file, its size, and whether it has a checkpoint there."""

    file: str
    number: int
    parent_key: bytes
    bytes: int
    has_state: bool


class FileIndex:
    """Files by name, and places by the keys of blocks. The caller holds a lock."""

    def __init__(self) -> None:
        self._files: dict[str, list[bytes]] = {}
        self._locations: dict[bytes, dict[str, BlockLocation]] = {}
        # Parent's key -> keys of its blocks and their numbers of tokens.
        self._following: dict[bytes, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._locations)

    @property
    def names(self) -> KeysView[str]:
        return self._files.keys()

    def find(self, key: bytes) -> BlockLocation | None:
        """The place of a block: with its checkpoint, if an older file has it without."""
        locations = self._locations.get(key, {}).values()
        return max(locations, key=lambda location: location.has_state, default=None)

    def following(self, parent_key: bytes) -> dict[bytes, int]:
        """Blocks whose parent is `parent_key`, and their numbers of tokens."""
        return dict(self._following.get(parent_key, {}))

    def run(self, keys: Sequence[bytes]) -> tuple[str, list[bytes]] | None:
        """The file of the first of `keys`, and the following keys in it; None if it is in no file."""
        first = self.find(keys[0])
        if first is None:
            return None
        count = 0
        for number, key in enumerate(keys, first.number):
            location = self.find(key)
            # A later block may be in this file, and with its checkpoint in another.
            if location is None or (location.file, location.number) != (first.file, number):
                break
            count += 1
        return first.file, list(keys[:count])

    def add(self, name: str, blocks: Sequence[HostBlock | BlockHeader]) -> None:
        """Add a file of these blocks, or replace it."""
        self.drop(name)
        self._files[name] = [block.key for block in blocks]
        for number, block in enumerate(blocks):
            location = BlockLocation(name, number, block.parent_key, block.bytes, bool(block.form))
            self._locations.setdefault(block.key, {})[name] = location
            self._following.setdefault(block.parent_key, {})[block.key] = block.length

    def drop(self, name: str) -> None:
        """Remove a file, if it is here."""
        for key in self._files.pop(name, ()):
            location = self._locations[key].pop(name)
            if not self._locations[key]:
                del self._locations[key]
                family = self._following[location.parent_key]
                del family[key]
                if not family:
                    del self._following[location.parent_key]
