"""Bytes: what a row will hold, what MLX has, and the limit on wired memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# mlx-lm's caches grow by so many tokens at a time.
_GROWTH_TOKENS = 256


@dataclass(frozen=True)
class CacheShape:
    """The caches of one row: bytes a token, each with the tokens it is capped at, and bytes that never grow."""

    layers: tuple[tuple[float, int | None], ...]
    constant_bytes: int

    def project(self, tokens: int) -> int:
        """Bytes of caches that hold `tokens`."""
        grown = -(-tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS
        total = float(self.constant_bytes)
        for token_bytes, cap in self.layers:
            total += token_bytes * (grown if cap is None else min(grown, cap))
        return int(total)


def measure_caches(caches: list[Any]) -> CacheShape:
    """The shape of caches of one row that hold at least one token."""
    layers: list[tuple[float, int | None]] = []
    constant = 0
    for cache in _leaves(caches):
        keys = getattr(cache, "keys", None)
        if isinstance(keys, (list, tuple)):
            keys = keys[0]
        if isinstance(keys, mx.array):
            cap = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            layers.append((cache.nbytes / max(1, keys.shape[-2]), cap))
        else:
            constant += cache.nbytes
    return CacheShape(tuple(layers), constant)


def wire_memory() -> int | None:
    """Let MLX wire as much memory as Metal recommends; returns the limit to restore, None without Metal."""
    if not mx.metal.is_available():
        return None
    return mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def unwire_memory(limit_bytes: int | None) -> None:
    """Restore the limit that `wire_memory` returned."""
    if limit_bytes is not None:
        mx.synchronize()
        mx.set_wired_limit(limit_bytes)


def _leaves(caches: Any) -> list[Any]:
    """The caches inside lists of caches."""
    found = []
    for cache in caches:
        nested = getattr(cache, "caches", None)
        found += _leaves(nested) if nested is not None else [cache]
    return found
