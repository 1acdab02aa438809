"""Changes of plain caches of a batch, all layers together: what is alike in them is computed once.

A model has dozens of layers. An array that the host makes, or an operation on a few numbers, costs the host as much as
one on all keys of a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.gathered import columns_in_order, rows_of
from zmqengine.engine.kv.ragged import RaggedKVCache, with_room
from zmqengine.engine.models.mlx_lm import KVCache
from zmqengine.engine.row import Caches


def is_plain(cache: Any) -> bool:
    """Whether a cache of a batch is for the functions below."""
    return type(cache) is RaggedKVCache and cache.keys is not None


def are_plain_rows(same_layer: Sequence[Any]) -> bool:
    """Whether caches of rows are for `merge`: all hold something, or none does."""
    if any(type(cache) is not KVCache for cache in same_layer):
        return False
    return len({cache.keys is None for cache in same_layer}) == 1


def merge(layers: Sequence[Sequence[Any]]) -> Caches:
    """A batch of the rows that each of `layers` has; their own caches stay as they are."""
    lengths = [cache.offset for cache in layers[0]]
    longest = max(lengths)
    offset, left_padding = resident(lengths), resident([longest - length for length in lengths])
    if layers[0][0].keys is None:
        return [RaggedKVCache.of(None, None, offset, left_padding, 0) for _ in layers]
    size = with_room(longest)

    def joined(same_layer: Sequence[Any], name: str) -> mx.array:
        parts = [
            _placed(getattr(cache, name)[..., :length, :], longest - length, size)
            for cache, length in zip(same_layer, lengths, strict=True)
        ]
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    return [
        RaggedKVCache.of(joined(layer, "keys"), joined(layer, "values"), offset, left_padding, longest)
        for layer in layers
    ]


def extend(caches: Caches, others: Caches) -> None:
    """Add the rows of `others` at the end of `caches`."""
    first, other = caches[0], others[0]
    longest = max(first._idx, other._idx)
    size = max(with_room(longest), first.keys.shape[2], other.keys.shape[2])
    offset = resident(mx.concatenate([first.offset, other.offset]))
    left_padding = resident(
        mx.concatenate([each.left_padding + (longest - each._idx) for each in (first, other)])
    )
    for cache, added in zip(caches, others, strict=True):
        for name in ("keys", "values"):
            parts = [_placed(getattr(each, name), longest - each._idx, size) for each in (cache, added)]
            setattr(cache, name, mx.concatenate(parts))
        _set(cache, offset, left_padding, longest)


def keep_rows(caches: Iterable[Any], places: Sequence[int], held: Sequence[int]) -> None:
    """Keep just the rows at `places`; the rows of the batch hold `held` tokens."""
    # The caches' own way asks the device for the padding, and so waits for the step on its way. We know it: rows are
    # right-justified, and a row that holds n tokens is n long.
    lengths = [held[place] for place in places]
    longest = max(lengths)
    index = resident(places)
    offset, left_padding = resident(lengths), resident([longest - length for length in lengths])
    for cache in caches:
        start = cache._idx - longest
        columns = slice(start, start + with_room(longest))
        cache.keys = rows_of(cache.keys, index, columns)
        cache.values = rows_of(cache.values, index, columns)
        _set(cache, offset, left_padding, longest)


def move_right(caches: Iterable[Any], padding: Sequence[int]) -> None:
    """The last `padding[i]` columns of row i hold nothing: bring them to the front; those of all rows are cut off."""
    common = min(padding)
    padding = [count - common for count in padding]
    for whole_columns, group in _by_columns(caches):
        first, columns = group[0], whole_columns - common
        if not any(padding):
            offset = resident(first.offset - common)
            for cache in group:
                _set(cache, offset, first.left_padding, columns)
            continue
        order = (np.arange(columns)[None] - np.array(padding)[:, None]) % columns
        taken = mx.array(order.astype(np.uint32))
        moved = mx.array(padding)
        offset = resident(first.offset - moved - common)
        left_padding = resident(first.left_padding + moved)
        for cache in group:
            for name in ("keys", "values"):
                array = getattr(cache, name)
                setattr(cache, name, _placed(columns_in_order(array, taken), 0, array.shape[2]))
            _set(cache, offset, left_padding, columns)


def _by_columns(caches: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for cache in caches:
        found[cache._idx].append(cache)
    yield from found.items()


def _placed(array: mx.array, left: int, size: int) -> mx.array:
    """`array` after `left` empty columns, in `size` columns in all."""
    right = size - left - array.shape[2]
    if right < 0:
        array = array[..., : size - left, :]
        right = 0
    return mx.pad(array, [(0, 0), (0, 0), (left, right), (0, 0)]) if left or right else array


def _set(cache: Any, offset: mx.array, left_padding: mx.array, columns: int) -> None:
    cache.offset, cache.left_padding, cache._idx = offset, left_padding, columns
