"""Which blocks are in which file."""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import NamedTuple

from zmqengine.engine.prefix_cache.disk.block_header import Header
from zmqengine.engine.prefix_cache.disk.host_block import HostBlock


class Place(NamedTuple):
    """Location and bytes of a block. With a state, any model can continue from it."""

    file: str
    number: int
    parent_key: bytes
    tokens: int
    bytes: int
    has_state: bool


class FileIndex:
    """Files by name, and places by the keys of blocks. `find` may be called by other threads than the rest."""

    def __init__(self) -> None:
        self._files: dict[str, list[bytes]] = {}
        self._places: dict[bytes, Place] = {}
        self._following: dict[bytes, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def names(self) -> KeysView[str]:
        """Bytes of all files."""
        return self._files.keys()

    def find(self, key: bytes) -> Place | None:
        """Location of this block."""
        return self._places.get(key)

    def following(self, parent_key: bytes) -> dict[bytes, int]:
        """The blocks after this one, and how many tokens they have; the longest first."""
        found = self._following.get(parent_key, {})
        return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

    def run(self, keys: Sequence[bytes]) -> tuple[str, list[bytes]] | None:
        """The file that the first of `keys` is in, and those that follow it there; None if it is in none."""
        first = self._places.get(keys[0])
        if first is None:
            return None
        count = 0
        for number, key in enumerate(keys, first.number):
            place = self._places.get(key)
            # It may be elsewhere with a state, and here without.
            if place is None or (place.file, place.number) != (first.file, number):
                break
            count += 1
        return first.file, list(keys[:count])

    def largest_file(self) -> list[bytes]:
        """The keys of its blocks; empty when there is no file."""

        def size(keys: list[bytes]) -> int:
            return sum(place.bytes for place in map(self._places.get, keys) if place is not None)

        return max(self._files.values(), key=size) if self._files else []

    def add_header(self, name: str, header: Header) -> None:
        """Take in a file that was found."""
        parents = [header.parent_key, *(block.key for block in header.blocks)]
        self._add(
            name,
            {
                block.key: Place(
                    name, number, parent, block.tokens, block.end - block.start, bool(block.form)
                )
                for number, (block, parent) in enumerate(zip(header.blocks, parents, strict=False))
            },
        )

    def add_blocks(self, name: str, blocks: Sequence[HostBlock]) -> None:
        """Take in a file that was written."""
        self._add(
            name,
            {
                block.key: Place(
                    name, number, block.parent_key, len(block.tokens), block.bytes, bool(block.form)
                )
                for number, block in enumerate(blocks)
            },
        )

    def drop(self, name: str) -> None:
        """A file is gone."""
        for key in self._files.pop(name, []):
            place = self._places.get(key)
            if place is not None and place.file == name:
                del self._places[key]
                family = self._following.get(place.parent_key, {})
                family.pop(key, None)
                if not family:
                    self._following.pop(place.parent_key, None)

    def _add(self, name: str, places: dict[bytes, Place]) -> None:
        self._files[name] = list(places)
        for key, place in places.items():
            known = self._places.get(key)
            # A block may have been written before its state was worth keeping.
            if known is None or (place.has_state and not known.has_state):
                self._places[key] = place
            self._following.setdefault(place.parent_key, {})[key] = place.tokens
