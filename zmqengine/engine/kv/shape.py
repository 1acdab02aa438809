"""Bytes of a model's KV caches, measured from real ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS
from zmqengine.engine.kv.row_caches import single_caches
from zmqengine.engine.row import Caches


@dataclass(frozen=True)
class CacheShape:
    """Bytes of one row's caches: for each bound on cached tokens, the bytes a token of the layers with that bound; and
    a constant."""

    layers: tuple[tuple[float, int | None], ...]
    constant_bytes: int

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token in layers with full attention."""
        return sum(token_bytes for token_bytes, cap in self.layers if cap is None)

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
