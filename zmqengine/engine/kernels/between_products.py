"""What a layer does between its products, on CUDA, each in one kernel.

Both take a product as it is, of half precision, or in parts that are still to be added, as
`plain_products.parts_of_many_rows` leaves it: that saves a kernel and a way through memory.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.kernels.kernel_text import kernel_text

_FOUR = 4
_LANES = 32
_THREADS_MAX = 1024
_WARPS = 4
PAIRED = 2 * _LANES
"""Dimensions of a head, and those of them that are turned, are a multiple of it."""


class Rotation(NamedTuple):
    """How queries and keys are turned by their places, in the terms of `mx.fast.rope`."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None


class HeadNorms(NamedTuple):
    """Weights [dim] by which queries and keys are normalised, head by head, and what is added to the square."""

    queries: mx.array
    keys: mx.array
    eps: float


def add_and_norm(
    residual: mx.array, added: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """`residual` [rows, width, dim] and what a product adds to it, [rows * width, dim] or [parts, rows * width, dim] in
    float32: their sum, and that after an RMS norm of these weights; both as `residual`."""
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


def turned_heads(
    product: mx.array,
    offset: mx.array,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: mx.Dtype,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys and values of the `shapes` of the first two, [rows, heads, width, dim], of `dtype`.

    `product` is [rows * width, outputs] or [parts, rows * width, outputs] in float32, and a row stands at `offset`
    [rows].
    """
    (rows, heads, width, dim), (_, key_heads, *_) = shapes
    warps = rows * width * (heads + 2 * key_heads)
    queries, keys, values = _turned_heads()(
        # What is not used has to be something.
        inputs=[
            product,
            offset,
            offset if rotation.freqs is None else rotation.freqs,
            *((offset, offset) if norms is None else (norms.queries, norms.keys)),
        ],
        template=[
            ("T", dtype),
            ("P", product.dtype),
            ("WHOLE", product.ndim == 2),
            ("H", heads),
            ("KH", key_heads),
            ("D", dim),
            ("DIMS", rotation.dims),
            ("FREQS", rotation.freqs is not None),
            ("BASE", _bits(0.0 if rotation.base is None else math.log2(rotation.base))),
            ("SCALE", _bits(rotation.scale)),
            ("NORMS", norms is not None),
            ("EPS", _bits(0.0 if norms is None else norms.eps)),
            ("WARPS", _WARPS),
        ],
        grid=(-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
        threadgroup=(_WARPS * _LANES, 1, 1),
        output_shapes=[shapes[0], shapes[1], shapes[1]],
        output_dtypes=[dtype] * 3,
    )
    return queries, keys, values


def _bits(number: float) -> int:
    """A constant of a kernel is a whole number."""
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
def _turned_heads() -> Any:
    return mx.fast.cuda_kernel(
        name="rotary_heads",
        input_names=["product", "offset", "freqs", "query_norm", "key_norm"],
        output_names=["queries", "keys", "values"],
        source=kernel_text("rotary_heads.cu"),
    )
