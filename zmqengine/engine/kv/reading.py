"""Reading prompt tokens into caches, so that these stay as small as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.plain import move_right
from zmqengine.engine.kv.ragged import RaggedKVCache
from zmqengine.engine.kv.rows import single_caches
from zmqengine.engine.models.mlx_lm import BatchRotatingKVCache, KVCache, RotatingKVCache
from zmqengine.engine.row import Caches


def read_alone(model: Any, caches: Caches, tokens: Sequence[int], size: int = 0) -> mx.array:
    """Read `tokens` into the caches of one row; the logits, not computed yet.

    With a larger `size` so many are read, the last ones without a meaning, and caches go back to where `tokens` end:
    only for caches that can, which are plain ones. Then there are `size` logits.
    """
    extra = max(0, size - len(tokens))
    for cache in single_caches(caches):
        if type(cache) is KVCache:
            _drop_slack(cache, len(tokens) + extra)
    logits: mx.array = model(mx.array([[*tokens, *[0] * extra]], dtype=mx.uint32), cache=caches)
    if extra:
        for cache in single_caches(caches):
            cache.trim(extra)
    _keep_to_windows(caches)
    return logits


def read_together(model: Any, caches: Caches, texts: Sequence[Sequence[int]], size: int = 0) -> mx.array:
    """Read a text for each row of a batch, shorter ones padded; the logits, not computed yet.

    With a larger `size` all are padded to it, as in `read_alone`.
    """
    lengths = [len(text) for text in texts]
    padding = [max(size, *lengths) - length for length in lengths]
    others = [cache for cache in caches if type(cache) is not RaggedKVCache]
    if any(padding):
        for cache in others:
            cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*text, *[0] * extra] for text, extra in zip(texts, padding, strict=True)]
    logits: mx.array = model(mx.array(padded, dtype=mx.uint32), cache=caches)
    if any(padding):
        move_right([cache for cache in caches if type(cache) is RaggedKVCache], padding)
        for cache in others:
            cache.finalize()
    _keep_to_windows(caches)
    return logits


def beginning(caches: Caches, tokens: int) -> Caches:
    """The first `tokens` that plain caches of one row hold, without room for more."""
    found = []
    for cache in caches:
        other: Any = KVCache()  # type: ignore[no-untyped-call]
        if tokens:
            other.keys, other.values = cache.keys[..., :tokens, :], cache.values[..., :tokens, :]
            other.offset = tokens
        found.append(other)
    return found


def _drop_slack(cache: Any, count: int) -> None:
    # A cache that grows cuts off what it has to spare, unless it holds a multiple of its step: then it would keep
    # both, and be larger than projected.
    spare = cache.keys is not None and cache.keys.shape[2] > cache.offset
    if spare and cache.offset % cache.step == 0 and cache.offset + count > cache.keys.shape[2]:
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]


def _keep_to_windows(caches: Caches) -> None:
    # A sliding cache that reads a chunk keeps all of it until the next call. Now is soon enough.
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
