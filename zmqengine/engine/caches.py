"""What we ask of mlx-lm's caches: for one row, for a batch, and in bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.engine.mlx_lm_border import (
    BatchKVCache,
    KVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from zmqengine.engine.row import Caches


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def can_merge(caches: Caches) -> bool:
    """Whether rows with such caches can be stepped together."""
    return all(hasattr(cache, "merge") for cache in caches)


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be cut off."""
    return bool(can_trim_prompt_cache(caches))


def merge(rows: Sequence[Caches]) -> Caches:
    """The caches of a batch of these rows, in this order. The rows' own caches stay as they are."""
    return [same_layer[0].merge(list(same_layer)) for same_layer in zip(*rows, strict=True)]


def extend(caches: Caches, others: Caches) -> Caches:
    """Add the rows of `others` at the end of a batch."""
    if not caches:
        return others
    for cache, other in zip(caches, others, strict=True):
        cache.extend(other)
    return caches


def keep_rows(caches: Caches, places: list[int], held: Sequence[int]) -> Caches:
    """Keep just the rows at `places` of a batch; `held` is how many tokens each row of the batch holds."""
    if not places:
        return []
    index = mx.array(places)
    lengths = [held[place] for place in places]
    for cache in caches:
        if type(cache) is BatchKVCache and cache.keys is not None:
            _keep_rows_of_kv(cache, index, lengths)
        else:
            cache.filter(places)
    return caches


def extract(caches: Caches, place: int, held: int) -> Caches:
    """The caches of the row at `place`, which holds `held` tokens, as copies."""
    return [
        _extract_kv(cache, place, held)
        if type(cache) is BatchKVCache and cache.keys is not None
        else cache.extract(place)
        for cache in caches
    ]


def _keep_rows_of_kv(cache: Any, index: mx.array, lengths: list[int]) -> None:
    # BatchKVCache.filter asks the device for the padding, in every layer, and so waits for the step on its way.
    # We know it: rows are right-justified, and a row that holds n tokens is n long.
    start = cache._idx - max(lengths)
    cache.keys = cache.keys[index][..., start:, :]
    cache.values = cache.values[index][..., start:, :]
    cache._idx -= start
    cache.offset = mx.array(lengths)
    cache.left_padding = mx.array([cache._idx - length for length in lengths])


def _extract_kv(cache: Any, place: int, held: int) -> KVCache:
    single = KVCache()  # type: ignore[no-untyped-call]
    span = slice(cache._idx - held, cache._idx)
    single.keys = mx.contiguous(cache.keys[place : place + 1, :, span])
    single.values = mx.contiguous(cache.values[place : place + 1, :, span])
    single.offset = held
    return single


def take_prefix(caches: Caches, held: int, wanted: int) -> Caches:
    """A copy of the caches of a row that hold `held` tokens, cut to the first `wanted`, where `can_trim` allows it."""
    taken = copy.deepcopy(caches)
    if held != wanted:
        trim_prompt_cache(taken, held - wanted)
    return taken


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """Every array of these caches, to be evaluated."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def start(*values: Any) -> None:
    """Begin to compute arrays, or trees of them, without waiting."""
    mx.async_eval(*values)  # type: ignore[no-untyped-call]


def byte_count(caches: Iterable[Any]) -> int:
    """Bytes that these caches hold now."""
    return sum(cache.nbytes for cache in caches)
