"""A binary heap with removal of any item."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[float, int]


class IndexedHeap(Generic[Item]):
    """Items by key, the least first. Keys are distinct, items hashable.

    Each operation takes O(log n) at worst, `first` and `in` O(1). A removed item leaves no dead entry behind, so
    nothing keeps an ended request alive.
    """

    __slots__ = ("_entries", "_places")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Item]] = []
        self._places: dict[Item, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def first(self) -> tuple[Key, Item] | None:
        return self._entries[0] if self._entries else None

    def push(self, item: Item, key: Key) -> None:
        """Add an item; it must not be in the heap."""
        assert item not in self._places, "an item is in the heap once"
        self._entries.append((key, item))
        self._sift_up(len(self._entries) - 1)

    def remove(self, item: Item) -> None:
        """Remove an item. Raises KeyError if it is not in the heap."""
        index = self._places.pop(item)
        last = self._entries.pop()
        if index < len(self._entries):
            self._entries[index] = last
            self._settle(index)

    def rekey(self, item: Item, key: Key) -> None:
        """Change an item's key. Raises KeyError if it is not in the heap."""
        index = self._places[item]
        self._entries[index] = (key, item)
        self._settle(index)

    def _settle(self, place: int) -> None:
        if place and self._entries[place][0] < self._entries[(place - 1) >> 1][0]:
            self._sift_up(place)
        else:
            self._sift_down(place)

    def _sift_up(self, place: int) -> None:
        entries, places = self._entries, self._places
        entry = entries[place]
        while place:
            above = (place - 1) >> 1
            if not entry[0] < entries[above][0]:
                break
            entries[place] = entries[above]
            places[entries[place][1]] = place
            place = above
        entries[place] = entry
        places[entry[1]] = place

    def _sift_down(self, place: int) -> None:
        entries, places = self._entries, self._places
        entry, size = entries[place], len(entries)
        while (below := 2 * place + 1) < size:
            if below + 1 < size and entries[below + 1][0] < entries[below][0]:
                below += 1
            if not entries[below][0] < entry[0]:
                break
            entries[place] = entries[below]
            places[entries[place][1]] = place
            place = below
        entries[place] = entry
        places[entry[1]] = place
