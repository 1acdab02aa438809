"""mlx-lm's caches of one row: a cache for each layer, or a list of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS
from zmqengine.engine.models.mlx_lm import (
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

Caches = list[Any]


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def single_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches themselves, out of the lists of caches that some layers have."""
    for cache in caches:
        nested = getattr(cache, "caches", None)
        if nested is None:
            yield cache
        else:
            yield from single_caches(nested)


def can_merge(caches: Caches) -> bool:
    """Whether rows with these caches can be merged into a batch."""
    return all(hasattr(cache, "merge") for cache in single_caches(caches))


def merge(rows: list[Caches]) -> Caches:
    """Caches of a batch: copies of those of single rows."""

    def merged(layer: tuple[Any, ...]) -> Any:
        if isinstance(layer[0], CacheList):
            children = zip(*(cache.caches for cache in layer), strict=True)
            return CacheList(*map(merged, children))  # type: ignore[no-untyped-call]
        return layer[0].merge(list(layer))

    return [merged(layer) for layer in zip(*rows, strict=True)]


def extract(batch: Caches, index: int) -> Caches:
    """Copies of the caches of one row of a batch."""

    def single(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(single, cache.caches))  # type: ignore[no-untyped-call]
        return cache.extract(index)

    return [single(cache) for cache in batch]


def drop_slack(caches: Caches, count: int) -> None:
    """Cut unused columns before `count` more are written.

    A growing cache drops them, unless its length is a multiple of its growth step: then it would keep both, and be
    larger than projected.
    """
    for cache in single_caches(caches):
        if not isinstance(cache, KVCache) or cache.keys is None or cache.values is None:
            continue
        room = cache.keys.shape[2]
        if room > cache.offset and cache.offset % cache.step == 0 and cache.offset + count > room:
            cache.keys = cache.keys[..., : cache.offset, :]
            cache.values = cache.values[..., : cache.offset, :]


def trim_to_windows(caches: Caches) -> None:
    """Drop the columns before the window of sliding layers: after a chunk of a prompt they would stay until the next
    call."""
    for cache in single_caches(caches):
        if type(cache) not in (RotatingKVCache, BatchRotatingKVCache) or cache.keys is None:
            continue
        extra = cache.keys.shape[2] - cache.max_size
        if extra > 0:
            cache.keys = mx.contiguous(cache._trim(extra, cache.keys))
            cache.values = mx.contiguous(cache._trim(extra, cache.values))
            cache._idx = cache.max_size
            if type(cache) is BatchRotatingKVCache:
                cache.left_padding -= extra


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """Every array of these caches, of a row or of a batch."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def byte_count(caches: Iterable[Any]) -> int:
    """Bytes of these caches."""
    return sum(cache.nbytes for cache in caches)


@dataclass(frozen=True)
class CacheShape:
    """Bytes of one row's caches: for each bound on cached tokens, the bytes a token of the layers with that bound; and
    a constant."""

    layers: tuple[tuple[float, int | None], ...]
    constant_bytes: int

    def project(self, tokens: int) -> int:
        """Upper bound of the bytes of caches that hold `tokens`, whatever their history."""
        grown = tokens + GROWTH_TOKENS
        total = float(self.constant_bytes)
        for token_bytes, cap in self.layers:
            total += token_bytes * (grown if cap is None else min(grown, cap))
        return math.ceil(total)


def measure_caches(caches: Caches) -> CacheShape:
    """The shape of caches of one row that hold at least one token."""
    layers: dict[int | None, float] = {}
    constant = 0
    for cache in single_caches(caches):
        keys = getattr(cache, "keys", None)
        if isinstance(keys, (list, tuple)):
            keys = keys[0]
        if isinstance(keys, mx.array):
            cap = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            layers[cap] = layers.get(cap, 0.0) + cache.nbytes / max(1, keys.shape[-2])
        else:
            constant += cache.nbytes
    return CacheShape(tuple((token_bytes, cap) for cap, token_bytes in layers.items()), constant)
