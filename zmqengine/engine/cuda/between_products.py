"""What a layer does between its products, on CUDA, each in one kernel.

Both take a product as it is, of half precision, or in parts that are still to be added, as
`plain_products.parts_of_many_rows` leaves it: that saves a kernel and a way through memory.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel_text import kernel_text

_FOUR = 4
_LANES = 32
_THREADS_MAX = 1024
_WARPS = 4
_INPUTS = ["product", "offset", "freqs", "query_norm", "key_norm"]
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


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries, keys and values of a layer, out of the product that makes all three: `count` heads of queries and
    `key_count` of keys, all of `dim` numbers of this type; how they are turned, and normed before that, if they are."""

    count: int
    key_count: int
    dim: int
    dtype: mx.Dtype
    rotation: Rotation
    norms: HeadNorms | None

    def shapes(self, rows: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of queries, keys and values [rows, heads, width, dim]."""
        keys = rows, self.key_count, width, self.dim
        return (rows, self.count, width, self.dim), keys, keys

    def turned(self, product: mx.array, offset: mx.array, width: int) -> tuple[mx.array, mx.array, mx.array]:
        """All three, of a `product` [rows * width, outputs] or [parts, rows * width, outputs] in float32, for rows that
        stand at `offset` [rows]."""
        queries, keys, values = _turned_heads()(
            inputs=[product, offset, *self._weights(offset)],
            output_shapes=list(self.shapes(offset.shape[0], width)),
            output_dtypes=[self.dtype] * 3,
            **self._call(product, offset.shape[0], width),
        )
        return queries, keys, values

    def turned_into(
        self,
        product: mx.array,
        offset: mx.array,
        width: int,
        keys: mx.array,
        values: mx.array,
        stop: mx.array,
    ) -> mx.array:
        """Only the queries; the others are written into the columns of `keys` and `values` [rows, heads, columns, dim]
        before `stop` [1]. MLX is told nothing of it: who reads those columns must come after who reads the queries."""
        (queries,) = _turned_into()(
            inputs=[product, offset, *self._weights(offset), keys, values, stop],
            output_shapes=[self.shapes(offset.shape[0], width)[0]],
            output_dtypes=[self.dtype],
            **self._call(product, offset.shape[0], width),
        )
        return queries  # type: ignore[no-any-return]

    @cached_property
    def _template(self) -> list[tuple[str, Any]]:
        rotation, norms = self.rotation, self.norms
        return [
            ("T", self.dtype),
            ("H", self.count),
            ("KH", self.key_count),
            ("D", self.dim),
            ("DIMS", rotation.dims),
            ("FREQS", rotation.freqs is not None),
            ("BASE", _bits(0.0 if rotation.base is None else math.log2(rotation.base))),
            ("SCALE", _bits(rotation.scale)),
            ("NORMS", norms is not None),
            ("EPS", _bits(0.0 if norms is None else norms.eps)),
            ("WARPS", _WARPS),
        ]

    def _weights(self, unused: mx.array) -> list[mx.array]:
        """Frequencies and norms. What there is not has to be something."""
        freqs, norms = self.rotation.freqs, self.norms
        return [
            unused if freqs is None else freqs,
            *((unused, unused) if norms is None else (norms.queries, norms.keys)),
        ]

    def _call(self, product: mx.array, rows: int, width: int) -> dict[str, Any]:
        warps = rows * width * (self.count + 2 * self.key_count)
        return {
            "template": [*self._template, ("P", product.dtype), ("WHOLE", product.ndim == 2)],
            "grid": (-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
            "threadgroup": (_WARPS * _LANES, 1, 1),
        }


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
        input_names=_INPUTS,
        output_names=["queries", "keys", "values"],
        source=kernel_text("rotary_heads.cu", "rotary_heads_whole.cu"),
    )


@cache
def _turned_into() -> Any:
    return mx.fast.cuda_kernel(
        name="rotary_heads_into",
        input_names=[*_INPUTS, "keys", "values", "stop"],
        output_names=["queries"],
        source=kernel_text("rotary_heads.cu", "rotary_heads_into.cu"),
        # Caches may be wider than what is used of them.
        ensure_row_contiguous=False,
    )
