"""Norms and rotations between the products of a layer, on CUDA, each in one kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.models.layers import HeadShape, Norm, RotaryEmbedding

_FOUR = 4
_LANES = 32
_THREADS_MAX = 1024
_WARPS = 4
# Dimensions of a head, and the rotated ones among them, are a multiple of this.
_PAIRED = 2 * _LANES
_DIM_MAX = 512
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def add_and_norm(
    residual: mx.array,
    added: mx.array,
    norm: Norm,
    added_norm: Norm | None = None,
    scale: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `Ops.add_and_norm`, for `residual` and `added` [tokens, dim]."""
    *_, dim = residual.shape
    threads = min(_THREADS_MAX, -(-dim // (_FOUR * _LANES)) * _LANES)
    kind = _Sum(
        residual.dtype,
        added.dtype,
        dim,
        norm.eps,
        None if added_norm is None else added_norm.eps,
        scale is not None,
    )
    # The weights of the norm stand for what there is not.
    unused = norm.weight
    total, normed = _add_and_norm(kind, threads)(
        inputs=[
            residual,
            added,
            norm.weight,
            unused if added_norm is None else added_norm.weight,
            unused if scale is None else scale,
        ],
        grid=(residual.size // dim * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[residual.shape, residual.shape],
    )
    return total, normed


def rotates(heads: HeadShape) -> bool:
    """Whether `rotate` supports these heads."""
    dims = 0 if heads.rotation is None else heads.rotation.dims
    is_fitting = dims % _PAIRED == 0 and heads.dim % _PAIRED == 0 and heads.dim <= _DIM_MAX
    return is_fitting and heads.dtype in _DTYPES


def rotate(
    heads: HeadShape, product: mx.array, places: mx.array, keys_values: Sequence[mx.array]
) -> mx.array:
    """Queries [tokens, heads, dim] of a `product` [tokens, outputs], as `Ops.rotate` makes them; keys and values are
    written in place.

    `places` [4 * tokens]: of each token the pool, and its slot, column and position there; a negative pool for padding,
    whose queries are not initialised. `keys_values`: keys and values of each pool [slots, heads, columns, dim]. MLX
    does not know of the write: a computation that reads those columns must be started after one that reads the queries.
    """
    (queries,) = _rotate(_kind(heads, product.dtype), len(keys_values) // 2)(
        inputs=[product, places, *_weights(heads, places), *keys_values],
        output_shapes=[(product.shape[0], heads.heads, heads.dim)],
        **_grid(heads, product.shape[0]),
    )
    return queries


class _RotationKind(NamedTuple):
    """A shape of heads as a kernel is compiled for it: without what is the same to it, and types in place of arrays."""

    heads: HeadShape
    rotation: RotaryEmbedding
    product: mx.Dtype
    freqs: mx.Dtype | None
    norms: tuple[mx.Dtype, mx.Dtype, float] | None


# A rotation of no dimensions.
_UNTURNED = RotaryEmbedding(0, False, None, 1.0, None, 1.0)


def _kind(heads: HeadShape, product: mx.Dtype) -> _RotationKind:
    rotation, norms = heads.rotation or _UNTURNED, heads.norms
    return _RotationKind(
        heads._replace(scale=1.0, rotation=None, norms=None, window=None, cap=None, sinks=None),
        rotation._replace(freqs=None),
        product,
        None if rotation.freqs is None else rotation.freqs.dtype,
        None if norms is None else (norms.queries.dtype, norms.keys.dtype, norms.eps),
    )


def _template(kind: _RotationKind) -> tuple[tuple[str, Any], ...]:
    heads, rotation, norms = kind.heads, kind.rotation, kind.norms
    return (
        ("T", heads.dtype),
        ("H", heads.heads),
        ("KH", heads.key_heads),
        ("D", heads.dim),
        ("GATED", heads.gated),
        ("KEYS_ARE_VALUES", heads.keys_are_values),
        ("READS_ONLY", heads.reads_only),
        ("DIMS", rotation.dims),
        ("TRADITIONAL", rotation.traditional),
        ("FREQS", kind.freqs is not None),
        ("BASE", bits_of(0.0 if rotation.base is None else math.log2(rotation.base))),
        ("SCALE", bits_of(rotation.scale)),
        ("FACTOR", bits_of(rotation.factor)),
        ("NORMS", norms is not None),
        ("EPS", bits_of(0.0 if norms is None else norms[2])),
        ("VALUE_NORMS", heads.value_eps is not None),
        ("VALUE_EPS", bits_of(heads.value_eps or 0.0)),
        ("WARPS", _WARPS),
        ("P", kind.product),
    )


def _weights(heads: HeadShape, unused: mx.array) -> list[mx.array]:
    """Frequencies and norms; `unused` in place of missing ones."""
    freqs, norms = None if heads.rotation is None else heads.rotation.freqs, heads.norms
    return [
        unused if freqs is None else freqs,
        *((unused, unused) if norms is None else (norms.queries, norms.keys)),
    ]


def _grid(heads: HeadShape, tokens: int) -> dict[str, Any]:
    warps = tokens * (heads.heads + (0 if heads.reads_only else 2 * heads.key_heads))
    return {
        "grid": (-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
        "threadgroup": (_WARPS * _LANES, 1, 1),
    }


def bits_of(number: float) -> int:
    """The bits of a float as an integer: a template argument of a kernel is an integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


class _Sum(NamedTuple):
    """A sum and its norms as the kernel is compiled for them."""

    dtype: mx.Dtype
    added: mx.Dtype
    dim: int
    eps: float
    added_eps: float | None
    is_scaled: bool


@lru_cache(maxsize=64)
def _add_and_norm(kind: _Sum, threads: int) -> Variant:
    kernel = Kernel(
        name="residual_norm",
        input_names=["residual", "added", "weight", "added_weight", "scale"],
        output_names=["sum", "normed"],
        source=kernel_text("residual_norm.cu"),
    )
    template = [
        ("T", kind.dtype),
        ("A", kind.added),
        ("N", kind.dim),
        ("THREADS", threads),
        ("EPS", bits_of(kind.eps)),
        ("ADDED_NORM", kind.added_eps is not None),
        ("ADDED_EPS", bits_of(kind.added_eps or 0.0)),
        ("SCALED", kind.is_scaled),
    ]
    return kernel.variant(template, [kind.dtype, kind.added, *[kind.dtype] * 3], [kind.dtype] * 2)


@lru_cache(maxsize=64)
def _rotate(kind: _RotationKind, pools: int) -> Variant:
    arrays = [f"{name}{number}" for number in range(pools) for name in ("keys", "values")]
    kernel = Kernel(
        name="rotary_heads",
        input_names=["product", "places", "freqs", "query_norm", "key_norm", *arrays],
        output_names=["queries"],
        source=for_each(kernel_text("rotary_heads.cu"), pools),
        ensure_row_contiguous=False,
    )
    # The places stand for what the model does not have.
    missing = mx.int32
    norms = (missing, missing) if kind.norms is None else kind.norms[:2]
    inputs = [kind.product, mx.int32, kind.freqs or missing, *norms, *[kind.heads.dtype] * len(arrays)]
    return kernel.variant(_template(kind), inputs, [kind.heads.dtype])
