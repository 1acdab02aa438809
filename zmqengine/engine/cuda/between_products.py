"""Norms and rotations between the products of a layer, on CUDA, each in one kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda.kernel_text import kernel_text
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
    total, normed = _add_and_norm()(
        inputs=[residual, added, weight],
        template=[
            ("T", residual.dtype),
            ("A", added.dtype),
            ("WHOLE", added.ndim == 2),
            ("N", dim),
            ("THREADS", threads),
            ("EPS", _bits(eps)),
        ],
        grid=(residual.size // dim * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[residual.shape, residual.shape],
        output_dtypes=[residual.dtype, residual.dtype],
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
    found: Sequence[mx.array] = _rotate()(
        inputs=[product, offset, *_weights(heads, offset)],
        output_shapes=shapes(heads, offset.shape[0], width),
        output_dtypes=[heads.dtype] * 3,
        **_call(heads, product, offset.shape[0], width),
    )
    return found


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
    (queries,) = _rotate_into()(
        inputs=[product, offset, *_weights(heads, offset), keys, values, stop],
        output_shapes=shapes(heads, offset.shape[0], width)[:1],
        output_dtypes=[heads.dtype],
        **_call(heads, product, offset.shape[0], width),
    )
    return queries  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _template(heads: HeadShape) -> tuple[tuple[str, Any], ...]:
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
    )


def _weights(heads: HeadShape, unused: mx.array) -> list[mx.array]:
    """Frequencies and norms; `unused` in place of missing ones."""
    freqs, norms = heads.rotation.freqs, heads.norms
    return [
        unused if freqs is None else freqs,
        *((unused, unused) if norms is None else (norms.queries, norms.keys)),
    ]


def _call(heads: HeadShape, product: mx.array, rows: int, width: int) -> dict[str, Any]:
    warps = rows * width * (heads.heads + 2 * heads.key_heads)
    return {
        "template": [*_template(heads), ("P", product.dtype), ("WHOLE", product.ndim == 2)],
        "grid": (-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
        "threadgroup": (_WARPS * _LANES, 1, 1),
    }


def _bits(number: float) -> int:
    """The bits of a float as an integer: a template argument of a kernel is an integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


@cache
def _add_and_norm() -> Any:
    return mx.fast.cuda_kernel(
        name="residual_norm",
        input_names=["residual", "added", "weight"],
        output_names=["sum", "normed"],
        source=kernel_text("residual_norm.cu"),
    )


@cache
def _rotate() -> Any:
    return mx.fast.cuda_kernel(
        name="rotary_heads",
        input_names=_INPUTS,
        output_names=["queries", "keys", "values"],
        source=kernel_text("rotary_heads.cu", "rotary_heads_whole.cu"),
    )


@cache
def _rotate_into() -> Any:
    return mx.fast.cuda_kernel(
        name="rotary_heads_into",
        input_names=[*_INPUTS, "keys", "values", "stop"],
        output_names=["queries"],
        source=kernel_text("rotary_heads.cu", "rotary_heads_into.cu"),
        # Caches may have more columns than are in use.
        ensure_row_contiguous=False,
    )
