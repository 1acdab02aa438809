"""Rows come to a batch and leave it, and the others stay where they are.

Elsewhere each is a copy of the whole batch. Here the last rows take the places of those that leave, and rows that come
take what was left empty. It needs a kernel that writes into the arrays of a cache, so it is done where layers do so too
(`RaggedKVCache.in_place`). MLX knows nothing of it: what was cut out of a batch must have been started before.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda import moved_rows
from zmqengine.engine.cuda.moved_rows import Move
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.ragged import Gaps, RaggedKVCache, follow_rows, with_room
from zmqengine.engine.kv.rows import start
from zmqengine.engine.row import Caches

# Of all rows that there is room for, those that may be empty.
_EMPTY_ROWS_SHARE = 1 / 8


def moves_rows(caches: Caches) -> bool:
    """Whether rows of this batch may be moved."""
    are_in_place = caches and all(type(cache) is RaggedKVCache and cache.in_place for cache in caches)
    return bool(are_in_place) and all(moved_rows.can_move(cache.keys) for cache in caches)


def arranged(places: Sequence[int]) -> list[int]:
    """The rows at `places` of a batch in the order in which the fewest of them move."""
    count = len(places)
    staying = {place for place in places if place < count}
    last = [place for place in places if place >= count]
    return [place if place in staying else last.pop() for place in range(count)]


def empty_bytes(caches: Caches) -> int:
    """Bytes of allocated rows that no request uses."""
    if not caches or type(caches[0]) is not RaggedKVCache or not caches[0].empty_bytes:
        return 0
    return sum(cache.empty_bytes for cache in caches)


def keep_rows(caches: Caches, places: Sequence[int], held: Sequence[int]) -> bool:
    """Keep just the rows at `places`, as `arranged` gives them; `held` is how many tokens each row of the batch holds.
    False, and nothing is done, if rows may not be moved, or if too much of the arrays would be empty."""
    count = len(places)
    if not moves_rows(caches) or any(place != at and place < count for at, place in enumerate(places)):
        return False
    first, longest = caches[0], max(held[place] for place in places)
    layers = [cache.all_rows() for cache in caches]
    room, _, columns, _ = layers[0][0].shape
    # A copy of a batch with gaps has as many columns.
    if room - count > room * _EMPTY_ROWS_SHARE or (first.gaps is None and columns > with_room(longest)):
        return False
    moved = [Move(place, at, 0, 0, first._idx) for at, place in enumerate(places) if place != at]
    if moved:
        start(moved_rows.move_rows(layers, layers, moved))
    for cache, whole in zip(caches, layers, strict=True):
        cache.show_rows(count, whole)
    follow_rows(caches, places, held)
    return True


def extend(caches: Caches, others: Caches) -> bool:
    """Add the rows of `others` at the end of a batch. False, and nothing is done, if there is no room for them."""
    if not moves_rows(caches):
        return False
    first, other = caches[0], others[0]
    if type(other) is not RaggedKVCache or other.keys is None or other._idx > first._idx:
        return False
    count, coming = first.keys.shape[0], other.keys.shape[0]
    layers = [cache.all_rows() for cache in caches]
    if count + coming > layers[0][0].shape[0]:
        return False
    before = first._idx - other._idx
    moved = [Move(place, count + place, 0, before, other._idx) for place in range(coming)]
    start(moved_rows.move_rows(layers, [(added.keys, added.values) for added in others], moved))
    offset = resident(mx.concatenate([first.offset, other.offset]))
    left_padding = resident(mx.concatenate([first.left_padding, other.left_padding + before]))
    gaps = first.gaps
    if gaps is not None:
        gaps = Gaps(np.pad(gaps.hidden, ((0, coming), (0, 0))))
    for cache, whole in zip(caches, layers, strict=True):
        cache.show_rows(count + coming, whole)
        cache.offset, cache.left_padding, cache.gaps = offset, left_padding, gaps
    return True
