"""Attention of encoders: that of MLX, and others where it is slow.

On Linux CPUs it computes exp number by number, and in float32 CUDA has no kernel for all of it.
"""

from __future__ import annotations

import mlx.core as mx

from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.models.cpu_math import exp_minus

SCORES_MIN = 16_384
"""Fewer scores take MLX less time than the calls of the own softmax: it computes about 50 of them in a microsecond."""


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
) -> mx.array:
    """Attention as `mx.fast.scaled_dot_product_attention` has it, of arrays (texts, heads, tokens, head width)."""
    if mask is not None and mask.dtype != mx.bool_:
        mask = mask.astype(queries.dtype)
    texts, heads, rows, _ = queries.shape
    scores_count = texts * heads * rows * keys.shape[2]
    # One head of keys or as many as of queries: products broadcast them.
    if on_gpu() or scores_count < SCORES_MIN or keys.shape[1] not in (1, heads):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    # Products copy arrays whose heads lie apart, one number at a time.
    scores = (queries * scale) @ mx.contiguous(keys).swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    weights = exp_minus(scores.max(axis=-1, keepdims=True) - scores)
    return (weights @ mx.contiguous(values)) / weights.sum(axis=-1, keepdims=True)


def attention_in_products(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array
) -> mx.array:
    """Attention with terms of scores for a `mask`, of all of its shape, in the fewest operations of a GPU.

    Where MLX has no kernel for float32, as on CUDA and on Metal for heads of 32, it makes seven operations. Here they
    are four: scale and mask are a product's own.
    """
    attend = mx.fast.scaled_dot_product_attention
    if queries.dtype != mx.float32 or keys.shape[1] != queries.shape[1]:
        return attend(queries, keys, values, scale=scale, mask=mask)
    try:
        return attend(queries, keys, values, scale=scale, mask=mask, force_fused=True)
    except ValueError:
        # There is no kernel for this shape.
        pass
    return mx.softmax(mx.addmm(mask, queries, keys.swapaxes(-1, -2), alpha=scale), axis=-1) @ values
