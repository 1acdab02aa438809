"""What our kernels for CUDA compute, by MLX's own calls: to compare with them, and to stand in for them."""

from __future__ import annotations

import mlx.core as mx

from zmqengine.engine.kernels.between_products import HeadNorms, Rotation


def add_and_norm(
    residual: mx.array, added: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """As `between_products.add_and_norm`."""
    total = residual + _whole(added, residual.dtype).reshape(residual.shape)
    return total, mx.fast.rms_norm(total, weight, eps)


def turned_heads(
    product: mx.array,
    offset: mx.array,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: mx.Dtype,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """As `between_products.turned_heads`."""
    (rows, heads, width, dim), (_, key_heads, *_) = shapes
    by_head = _whole(product, dtype).reshape(rows, width, -1, dim).transpose(0, 2, 1, 3)
    queries, keys, values = mx.split(by_head, [heads, heads + key_heads], axis=1)
    if norms is not None:
        queries = mx.fast.rms_norm(queries, norms.queries, norms.eps)
        keys = mx.fast.rms_norm(keys, norms.keys, norms.eps)
    return _turned(queries, offset, rotation), _turned(keys, offset, rotation), values


def _turned(heads: mx.array, offset: mx.array, rotation: Rotation) -> mx.array:
    return mx.fast.rope(
        heads,
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=rotation.scale,
        offset=offset,
        freqs=rotation.freqs,
    )


def _whole(product: mx.array, dtype: mx.Dtype) -> mx.array:
    return (product if product.ndim == 2 else product.sum(axis=0)).astype(dtype)
