"""Bytes: what a row will hold, what MLX has, and the limit on wired memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

# mlx-lm's caches grow by so many tokens at a time.
_GROWTH_TOKENS = 256
_PADDING_BYTES_MIN = 64 << 20
# The rest is left to the system and to other programs.
_SHARE = 0.8
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class CacheShape:
    """The caches of one row: bytes a token, each with the tokens it is capped at, and bytes that never grow."""

    layers: tuple[tuple[float, int | None], ...]
    constant_bytes: int

    @property
    def token_bytes(self) -> float:
        """What one more token takes for ever, in the layers that see everything."""
        return sum(token_bytes for token_bytes, cap in self.layers if cap is None)

    @property
    def trimmable(self) -> bool:
        """Whether the last tokens can always be cut off: no layer forgets, and none keeps a mere state."""
        return not self.constant_bytes and all(cap is None for _, cap in self.layers)

    def project(self, tokens: int) -> int:
        """Bytes of caches that hold `tokens`, at most."""
        # A batch's caches start as long as its prompts and grow in steps from there.
        grown = tokens + _GROWTH_TOKENS
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


def padding_allowance(parameter_bytes: int) -> int:
    """Bytes that padding may take in one batch of rows.

    Up to the size of the weights, padding is cheaper to read than the weights are a second time; but it may not
    take more than a quarter of what they leave of the memory limit.
    """
    left = (mx.get_memory_limit() - parameter_bytes) // 4
    return max(_PADDING_BYTES_MIN, min(parameter_bytes, left))


def recommended_bytes() -> int:
    """What MLX may hold here: what Metal recommends, else most of the memory of the device or of the container."""
    facts = mx.device_info()
    if int(facts.get("max_recommended_working_set_size", 0)) > 0:
        return int(facts["max_recommended_working_set_size"])
    if int(facts.get("total_memory", 0)) > 0:
        return int(int(facts["total_memory"]) * _SHARE)
    return int(system_bytes() * _SHARE)


def system_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """Memory of this machine, or of the container that this process runs in if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(control_group.read_text()))
    except (OSError, ValueError):
        # No such file, or the word "max".
        return machine


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
