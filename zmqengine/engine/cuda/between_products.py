"""Norms and rotations between the products of a layer, on CUDA, each in one kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.models.decoder_weights import HeadShape

_FOUR = 4
_LANES = 32
_THREADS_MAX = 1024
_WARPS = 4
_INPUTS = ["product", "offset", "freqs", "query_norm", "key_norm"]
# Dimensions of a head, and the rotated ones among them, are a multiple of this.
_PAIRED = 2 * _LANES
_DIM_MAX = 256
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def add_and_norm(
    residual: mx.array, added: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """The sum of `residual` and `added`, both [tokens, dim], and that sum after an RMS norm with `weight`."""
    *_, dim = residual.shape
    threads = min(_THREADS_MAX, -(-dim // (_FOUR * _LANES)) * _LANES)
    total, normed = _add_and_norm(residual.dtype, added.dtype, dim, threads, eps)(
        inputs=[residual, added, weight],
        grid=(residual.size // dim * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[residual.shape, residual.shape],
    )
    return total, normed


def rotates(heads: HeadShape) -> bool:
    """Whether `rotate` supports these heads."""
    rotation, dim = heads.rotation, heads.dim
    if rotation.traditional or rotation.factor != 1.0 or heads.dtype not in _DTYPES:
        return False
    return rotation.dims % _PAIRED == 0 and dim % _PAIRED == 0 and dim <= _DIM_MAX


def shapes(heads: HeadShape, rows: int, width: int) -> list[tuple[int, ...]]:
    """Shapes of queries, keys and values, [rows, heads, width, dim]."""
    return [(rows, count, width, heads.dim) for count in (heads.heads, heads.key_heads, heads.key_heads)]


def rotate(heads: HeadShape, product: mx.array, offset: mx.array, width: int) -> Sequence[mx.array]:
    """Queries, keys and values of the fused QKV product, normalised where the model does so, and rotated.

    `product` [rows * width, outputs]; `offset` [rows]: position of each row's first token.
    """
    return _rotate(heads, product.dtype)(
        inputs=[product, offset, *_weights(heads, offset)],
        output_shapes=shapes(heads, offset.shape[0], width),
        **_grid(heads, offset.shape[0] * width),
    )


def rotate_into(
    heads: HeadShape,
    product: mx.array,
    offset: mx.array,
    width: int,
    keys: mx.array,
    values: mx.array,
    stop: mx.array,
) -> mx.array:
    """Queries, as from `rotate`; keys and values are written in place, into the columns of `keys` and `values` before
    `stop` [1].

    `keys` and `values` are [rows, heads, columns, dim]. MLX does not know of the write: a computation that reads those
    columns must be started after one that reads the queries.
    """
    (queries,) = _rotate_into(heads, product.dtype)(
        inputs=[product, offset, *_weights(heads, offset), keys, values, stop],
        output_shapes=shapes(heads, offset.shape[0], width)[:1],
        **_grid(heads, offset.shape[0] * width),
    )
    return queries


def rotate_packed(
    heads: HeadShape, product: mx.array, places: mx.array, tokens: int, keys_values: Sequence[mx.array]
) -> mx.array:
    """Queries [tokens of `product`, heads, dim] of the first `tokens`; keys and values are written in place.

    `places` [4 * tokens]: of each token the segment, and its row, column and position there. `keys_values`: keys and
    values of each segment, as for `rotate_into`.
    """
    (queries,) = _rotate_packed(heads, product.dtype, len(keys_values) // 2)(
        inputs=[product, places, *_weights(heads, places), *keys_values],
        output_shapes=[(product.shape[0], heads.heads, heads.dim)],
        **_grid(heads, tokens),
    )
    return queries


def _template(heads: HeadShape, product: mx.Dtype) -> tuple[tuple[str, Any], ...]:
    rotation, norms = heads.rotation, heads.norms
    return (
        ("T", heads.dtype),
        ("H", heads.heads),
        ("KH", heads.key_heads),
        ("D", heads.dim),
        ("DIMS", rotation.dims),
        ("FREQS", rotation.freqs is not None),
        ("BASE", _bits(0.0 if rotation.base is None else math.log2(rotation.base))),
        ("SCALE", _bits(rotation.scale)),
        ("NORMS", norms is not None),
        ("EPS", _bits(0.0 if norms is None else norms.eps)),
        ("WARPS", _WARPS),
        ("P", product),
    )


def _weights(heads: HeadShape, unused: mx.array) -> list[mx.array]:
    """Frequencies and norms; `unused` in place of missing ones."""
    freqs, norms = heads.rotation.freqs, heads.norms
    return [
        unused if freqs is None else freqs,
        *((unused, unused) if norms is None else (norms.queries, norms.keys)),
    ]


def _grid(heads: HeadShape, tokens: int) -> dict[str, Any]:
    warps = tokens * (heads.heads + 2 * heads.key_heads)
    return {
        "grid": (-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
        "threadgroup": (_WARPS * _LANES, 1, 1),
    }


def _bits(number: float) -> int:
    """The bits of a float as an integer: a template argument of a kernel is an integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


@lru_cache(maxsize=64)
def _add_and_norm(
    dtype: mx.Dtype,
    added: mx.Dtype,
    dim: int,
    threads: int,
    eps: float,
) -> Variant:
    kernel = Kernel(
        name="residual_norm",
        input_names=["residual", "added", "weight"],
        output_names=["sum", "normed"],
        source=kernel_text("residual_norm.cu"),
    )
    template = [
        ("T", dtype),
        ("A", added),
        ("N", dim),
        ("THREADS", threads),
        ("EPS", _bits(eps)),
    ]
    return kernel.variant(template, [dtype, added, dtype], [dtype, dtype])


@lru_cache(maxsize=1024)
def _rotate(heads: HeadShape, product: mx.Dtype) -> Variant:
    kernel = Kernel(
        name="rotary_heads",
        input_names=_INPUTS,
        output_names=["queries", "keys", "values"],
        source=kernel_text("rotary_rows.cu", "rotary_heads.cu", "rotary_heads_whole.cu"),
    )
    return kernel.variant(_template(heads, product), _input_dtypes(heads, product), [heads.dtype] * 3)


@lru_cache(maxsize=1024)
def _rotate_into(heads: HeadShape, product: mx.Dtype) -> Variant:
    kernel = Kernel(
        name="rotary_heads_into",
        input_names=[*_INPUTS, "keys", "values", "stop"],
        output_names=["queries"],
        source=kernel_text("rotary_rows.cu", "rotary_heads.cu", "rotary_heads_into.cu"),
        # Caches may have more columns than are in use.
        ensure_row_contiguous=False,
    )
    inputs = [*_input_dtypes(heads, product), heads.dtype, heads.dtype, mx.int32]
    return kernel.variant(_template(heads, product), inputs, [heads.dtype])


@lru_cache(maxsize=1024)
def _rotate_packed(heads: HeadShape, product: mx.Dtype, segments: int) -> Variant:
    arrays = [f"{name}{number}" for number in range(segments) for name in ("keys", "values")]
    kernel = Kernel(
        name="rotary_heads_packed",
        input_names=[_INPUTS[0], "places", *_INPUTS[2:], *arrays],
        output_names=["queries"],
        source=for_each(
            kernel_text("rotary_packed.cu", "rotary_heads.cu", "rotary_heads_packed.cu"), segments
        ),
        ensure_row_contiguous=False,
    )
    inputs = [*_input_dtypes(heads, product), *[heads.dtype] * len(arrays)]
    return kernel.variant(_template(heads, product), inputs, [heads.dtype])


def _input_dtypes(heads: HeadShape, product: mx.Dtype) -> list[mx.Dtype]:
    offset = mx.zeros((0,), mx.int32)
    return [product, offset.dtype, *(one.dtype for one in _weights(heads, offset))]
