"""A heap whose items can leave from anywhere."""

from __future__ import annotations

import random

from zmqengine.worker.scheduler.indexed_heap import IndexedHeap


def test_it_agrees_with_a_sorted_list_after_every_operation() -> None:
    """Push, remove and rekey in random order; the first is always the least."""
    chance = random.Random(7)
    heap: IndexedHeap[int] = IndexedHeap()
    keys: dict[int, tuple[float, int]] = {}
    for number in range(20_000):
        kind = chance.random()
        if kind < 0.5 or not keys:
            keys[number] = (chance.randrange(100), number)
            heap.push(number, keys[number])
        elif kind < 0.8:
            gone = chance.choice(list(keys)) if number % 50 == 0 else next(iter(keys))
            heap.remove(gone)
            del keys[gone]
        else:
            moved = next(reversed(keys))
            keys[moved] = (chance.randrange(100), moved)
            heap.rekey(moved, keys[moved])
        assert len(heap) == len(keys)
        if number % 20 == 0:
            first = heap.first()
            assert (first and first[0]) == min(keys.values(), default=None)
    for item in sorted(keys, key=lambda item: keys[item]):
        first = heap.first()
        assert first == (keys[item], item)
        heap.remove(item)
        assert item not in heap
    assert heap.first() is None
