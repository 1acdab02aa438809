"""Sliding-window caches of mlx-lm, trimmed: some of its calls leave unused columns allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.mlx_lm import BatchRotatingKVCache, RotatingKVCache


def is_sliding(cache: Any) -> bool:
    """Whether this is the cache of a layer with a sliding window, of a row or of a batch, and not empty."""
    return type(cache) in (RotatingKVCache, BatchRotatingKVCache) and cache.keys is not None


def keep_rows(cache: Any, indices: Sequence[int], lengths: Sequence[int]) -> None:
    """Keep the rows at `indices` of a batch, which hold `lengths` tokens, and drop columns that only longer rows
    used."""
    # `filter` keeps all columns, even if no remaining row has filled its window.
    cache.filter(mx.array(list(indices)))
    spare = cache.keys.shape[2] if cache.rotated else cache._idx
    spare -= max(lengths)
    if spare <= 0:
        return
    cache._temporal_order()
    cache.keys = mx.contiguous(cache.keys[..., spare : cache._idx, :])
    cache.values = mx.contiguous(cache.values[..., spare : cache._idx, :])
    cache._idx -= spare
    cache._offset = cache._idx
    cache.left_padding -= spare


def trim_to_window(cache: Any) -> None:
    """Drop the columns before the window. After a chunk of a prompt they would stay until the next call."""
    extra = cache.keys.shape[2] - cache.max_size
    if extra > 0:
        cache.keys = mx.contiguous(cache._trim(extra, cache.keys))
        cache.values = mx.contiguous(cache._trim(extra, cache.values))
        cache._idx = cache.max_size
        if type(cache) is BatchRotatingKVCache:
            cache.left_padding -= extra
