"""Caches of one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.ragged import RaggedKVCache
from zmqengine.engine.models.mlx_lm import KVCache, make_prompt_cache
from zmqengine.engine.row import Caches


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def as_batch(caches: Caches) -> Caches:
    """A batch of this one row, which has no caches of its own any more."""
    known = [cache for cache in caches if type(cache) is KVCache and cache.keys is not None]
    if known:
        # One array for all layers. To merge them would copy what they hold.
        offset, left_padding = resident([known[0].offset]), resident([0])
    return [
        RaggedKVCache.of(cache.keys, cache.values, offset, left_padding, cache.offset)
        if type(cache) is KVCache and cache.keys is not None
        else RaggedKVCache.merge([cache])
        if type(cache) is KVCache
        else cache.merge([cache])
        for cache in caches
    ]


def all_finite(values: Iterable[mx.array]) -> bool:
    """Whether every number is one. Waits until they are computed, once."""
    finite = [mx.all(mx.isfinite(value)) for value in values]
    return not finite or bool(mx.all(mx.stack(finite)).item())


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


def single_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches themselves, out of the lists of caches that some layers have."""
    for cache in caches:
        nested = getattr(cache, "caches", None)
        if nested is None:
            yield cache
        else:
            yield from single_caches(nested)
