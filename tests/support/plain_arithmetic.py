"""What our kernels for CUDA compute, by MLX's own calls: to compare with them, and to stand in for them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.support.kv_kernels import memory
from zmqengine.engine import kv
from zmqengine.engine.autotune import attention
from zmqengine.engine.cuda import between_products
from zmqengine.engine.cuda.between_products import Heads


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use these in place of the kernels of a layer."""
    monkeypatch.setattr(between_products, "add_and_norm", add_and_norm)
    monkeypatch.setattr(Heads, "turned", turned)
    monkeypatch.setattr(Heads, "turned_into", turned_into)
    monkeypatch.setattr(attention, "ragged_attention", ragged_attention)


def add_and_norm(
    residual: mx.array, added: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """As `between_products.add_and_norm`."""
    total = residual + _whole(added, residual.dtype).reshape(residual.shape)
    return total, mx.fast.rms_norm(total, weight, eps)


def turned(
    heads: Heads, product: mx.array, offset: mx.array, width: int
) -> tuple[mx.array, mx.array, mx.array]:
    """As `Heads.turned`."""
    by_token = _whole(product, heads.dtype).reshape(offset.shape[0], width, -1, heads.dim)
    ends = [heads.count, heads.count + heads.key_count]
    queries, keys, values = mx.split(by_token.transpose(0, 2, 1, 3), ends, axis=1)
    if heads.norms is not None:
        queries = mx.fast.rms_norm(queries, heads.norms.queries, heads.norms.eps)
        keys = mx.fast.rms_norm(keys, heads.norms.keys, heads.norms.eps)
    return _rope(queries, offset, heads), _rope(keys, offset, heads), values


def turned_into(
    heads: Heads,
    product: mx.array,
    offset: mx.array,
    width: int,
    keys: mx.array,
    values: mx.array,
    stop: mx.array,
) -> mx.array:
    """As `Heads.turned_into`."""
    queries, *fresh = turned(heads, product, offset, width)
    last: Any = stop.item()
    for array, columns in zip((keys, values), fresh, strict=True):
        memory(array)[..., last - width : last, :] = memory(columns)
    return queries


def ragged_attention(
    queries: mx.array, keys: mx.array, values: mx.array, spans: kv.Spans, scale: float
) -> mx.array:
    """As `attention.ragged_attention`."""
    seen: Any = (keys[..., : spans.columns, :], values[..., : spans.columns, :])
    result: mx.array = mx.fast.scaled_dot_product_attention(queries, *seen, scale=scale, mask=spans.as_mask())
    return result


def _rope(inputs: mx.array, offset: mx.array, heads: Heads) -> mx.array:
    rotation = heads.rotation
    return mx.fast.rope(
        inputs,
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=rotation.scale,
        offset=offset,
        freqs=rotation.freqs,
    )


def _whole(product: mx.array, dtype: mx.Dtype) -> mx.array:
    return (product if product.ndim == 2 else product.sum(axis=0)).astype(dtype)
