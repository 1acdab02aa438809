"""Kernels of recurrent layers: two for the delta rule, one for a short convolution, for all pieces of a step.

Windows and states are arrays of slots, read and written in place: MLX does not know of the write, so that a computation
that reads them must be started after one that reads the outputs. Rows in decode, verify blocks and prompts of unlike
lengths share the kernels. The arithmetic is that of models/recurrence.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.between_products import bits_of
from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.models.recurrence import KEY_EPS, STEPS_MAX, DeltaShape, DeltaWeights, gated_norm

_LANES = 32
_WARPS = 4
_THREADS_MAX = 512
# Numbers of a place in the kernels' tables: a piece, and a tile of one.
_PIECE, _TILE_NUMBERS = 8, 2
# Tokens that a warp of the convolution takes, at least its window.
_TILE = 8
# Tokens whose heads are in shared memory at a time: 24 KiB of 128 dimensions.
_STAGED_NUMBERS = 6144
_STAGED_MAX = 32
# Rows of a value head's state in a thread block, where a prompt has few blocks.
_PROMPT_VALUES = 32
# Numbers of a row of the state that a thread has: for few tokens, and for many, where it waits for itself.
_STEP_NUMBERS, _PROMPT_NUMBERS = 32, 16
_DIMS = (64, 128, 256)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


@dataclass(frozen=True, slots=True)
class RecurrentPiece:
    """The next tokens of a row in `slot`, `count` of the step, behind `kept_count` accepted ones of its verify block.

    Those are rows `kept_begin` on of the product of that step. `is_first`: the slot has nothing of the row yet.
    `is_draft`: a verify block, which leaves the slot behind the kept ones.
    """

    slot: int
    count: int
    kept_begin: int = 0
    kept_count: int = 0
    is_first: bool = False
    is_draft: bool = False


def tables(
    pieces: Sequence[RecurrentPiece], tokens: int, kept_rows: int
) -> tuple[tuple[int, bool], list[mx.array]]:
    """A step as the kernels take it: numbers that they are launched for, and two tables.

    Its flat tokens are those of these pieces, in order, padded to `tokens`. `kept_rows`: rows of the product with the
    kept tokens.
    """
    padding = tokens - sum(piece.count for piece in pieces)
    places, tiles = [], []
    begin = work = 0
    for number, piece in enumerate([*pieces, RecurrentPiece(-1, padding)]):
        total = piece.kept_count + piece.count
        commit = piece.kept_count if piece.is_draft else total
        kept = piece.kept_begin, piece.kept_count
        places.append((piece.slot, begin, piece.count, *kept, work, commit, int(piece.is_first)))
        tiles += [(number, first) for first in range(0, total, _TILE)]
        begin, work = begin + piece.count, work + total
    is_long = any(piece.kept_count + piece.count > 2 * STEPS_MAX for piece in pieces)
    # A trace is for one size: places without tokens, and tiles of these. Any number of rows in decode has the same.
    size = len(places) if is_long else max(len(places), tokens + 1)
    places += [(-1, 0, 0, 0, 0, 0, 0, 0)] * (few_sizes(size) - len(places))
    work = tokens + kept_rows
    tiles += [(len(pieces), padding)] * (work // _TILE + len(places) - len(tiles))
    table = resident(mx.array(np.concatenate([np.ravel(places), np.ravel(tiles)]).astype(np.int32)))
    end = len(places) * _PIECE
    return (work, is_long), [table[:end], table[end:]]


def supports_delta(shape: DeltaShape, weights: DeltaWeights) -> bool:
    """Whether the kernels support these heads."""
    wide = (shape.dtype, mx.float32)
    return (
        shape.dtype in _DTYPES
        and shape.key_dim in _DIMS
        and shape.value_dim in _DIMS
        and 2 <= shape.kernel <= _TILE
        and weights.conv.dtype == shape.dtype
        and weights.a_log.dtype == mx.float32
        and weights.dt_bias.dtype in wide
        and weights.norm.dtype in wide
    )


def supports_convolution(weight: mx.array, bias: mx.array | None) -> bool:
    """Whether the kernel supports a short convolution."""
    return (
        weight.dtype in _DTYPES
        and 2 <= weight.shape[1] <= _TILE
        and (bias is None or bias.dtype == weight.dtype)
    )


def delta_layer(
    shape: DeltaShape,
    weights: DeltaWeights,
    kind: tuple[int, bool],
    product: mx.array,
    kept: mx.array,
    windows: mx.array,
    states: mx.array,
    places: mx.array,
    tiles: mx.array,
) -> mx.array:
    """Outputs [tokens, values] of a layer's joined `product` [tokens, outputs]; zeros for padding.

    `kept`: the product of the step before, or any, if no piece has kept tokens. `windows`
    [slots, kernel - 1, channels] and `states` [slots, value_heads, value_dim, key_dim], or their first slots in the
    memory of all, are written in place. `kind`, `places` and `tiles` are those of `tables`.
    """
    work, is_long = kind
    warps = tiles.size // _TILE_NUMBERS * (2 * shape.key_heads + shape.value_heads + 1)
    heads, gates = _heads_kernel(shape, weights.dt_bias.dtype)(
        inputs=[product, kept, places, tiles, weights.conv, weights.a_log, weights.dt_bias, windows],
        grid=(-(-warps // _WARPS) * _WARPS * _LANES, 1, 1),
        threadgroup=(_WARPS * _LANES, 1, 1),
        output_shapes=[(work, shape.channels), (work, shape.value_heads, 2)],
    )
    values, lanes = _rule_block(shape, is_long=is_long)
    threads, parts = values * lanes, shape.value_dim // values
    (outputs,) = _rule_kernel(shape, weights.norm.dtype, weights.eps, is_long)(
        inputs=[heads, gates, product, places, weights.norm, states],
        grid=(places.size // _PIECE * threads, shape.value_heads, parts),
        threadgroup=(threads, 1, 1),
        output_shapes=[(product.shape[0], shape.values)],
    )
    if parts == 1:
        return outputs
    y = mx.unflatten(outputs, 1, (shape.value_heads, shape.value_dim))
    z = product[:, shape.channels : shape.channels + shape.values].reshape(y.shape)
    return gated_norm(y, z, weights.norm, weights.eps).flatten(1)


def short_conv(
    weight: mx.array,
    bias: mx.array | None,
    product: mx.array,
    kept: mx.array,
    windows: mx.array,
    places: mx.array,
    tiles: mx.array,
) -> mx.array:
    """Outputs [tokens, channels] of LFM2's layer between its products, of a `product` [tokens, 3 channels]; zeros for
    padding.

    `weight` [channels, kernel]; `windows` [slots, kernel - 1, channels], written in place; else as `delta_layer`.
    """
    channels, kernel = weight.shape
    threads = _WARPS * _LANES
    (outputs,) = _short_conv_kernel(product.dtype, channels, kernel, bias is not None)(
        inputs=[product, kept, places, tiles, weight, weight if bias is None else bias, windows],
        grid=(-(-channels // threads) * threads, tiles.size // _TILE_NUMBERS, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(product.shape[0], channels)],
    )
    return outputs


def _rule_block(shape: DeltaShape, *, is_long: bool) -> tuple[int, int]:
    """Rows of a value head's state in a thread block, and threads for each.

    Few blocks have all of a long prompt: a head's state is shared out to several, and the norm is MLX's.
    """
    if is_long:
        return min(_PROMPT_VALUES, shape.value_dim), shape.key_dim // _PROMPT_NUMBERS
    lanes = shape.key_dim // _STEP_NUMBERS
    return min(shape.value_dim, _THREADS_MAX // lanes), lanes


@lru_cache(maxsize=16)
def _heads_kernel(shape: DeltaShape, dt_bias: mx.Dtype) -> Variant:
    kernel = Kernel(
        name="delta_heads",
        input_names=["product", "kept", "places", "tiles", "conv", "a_log", "dt_bias", "windows"],
        output_names=["heads", "gates"],
        source=kernel_text("delta_heads.cu"),
        header=kernel_text("recurrent_piece.cuh"),
        ensure_row_contiguous=False,
    )
    scale = float(shape.key_dim**-0.5)
    template = [
        *_template(shape),
        ("S", dt_bias),
        ("K", shape.kernel),
        ("TILE", _TILE),
        ("WARPS", _WARPS),
        ("SCALE", bits_of(scale)),
        ("EPS", bits_of(KEY_EPS * scale**2)),
    ]
    dtype = shape.dtype
    inputs = [dtype, dtype, mx.int32, mx.int32, dtype, mx.float32, dt_bias, dtype]
    return kernel.variant(template, inputs, [dtype, mx.float32])


@lru_cache(maxsize=16)
def _rule_kernel(shape: DeltaShape, norm: mx.Dtype, eps: float, is_long: bool) -> Variant:
    values, lanes = _rule_block(shape, is_long=is_long)
    kernel = Kernel(
        name="delta_rule",
        input_names=["heads", "gates", "product", "places", "norm", "states"],
        output_names=["out"],
        source=kernel_text("delta_rule.cu"),
        header=kernel_text("four.cuh", "recurrent_piece.cuh"),
        ensure_row_contiguous=False,
    )
    tile = min(_STAGED_MAX, _STAGED_NUMBERS // (2 * shape.key_dim + values))
    template = [
        *_template(shape),
        ("W", norm),
        ("VALUES", values),
        ("LANES", lanes),
        ("TILE", tile),
        ("EPS", bits_of(eps)),
    ]
    dtype = shape.dtype
    inputs = [dtype, mx.float32, dtype, mx.int32, norm, mx.float32]
    return kernel.variant(template, inputs, [dtype])


@lru_cache(maxsize=16)
def _short_conv_kernel(dtype: mx.Dtype, channels: int, width: int, has_bias: bool) -> Variant:
    kernel = Kernel(
        name="short_conv",
        input_names=["product", "kept", "places", "tiles", "conv", "bias", "windows"],
        output_names=["out"],
        source=kernel_text("short_conv.cu"),
        header=kernel_text("recurrent_piece.cuh"),
        ensure_row_contiguous=False,
    )
    template: list[tuple[str, Any]] = [
        ("T", dtype),
        ("N", channels),
        ("K", width),
        ("TILE", _TILE),
        ("THREADS", _WARPS * _LANES),
        ("BIAS", has_bias),
    ]
    inputs = [dtype, dtype, mx.int32, mx.int32, dtype, dtype, dtype]
    return kernel.variant(template, inputs, [dtype])


def _template(shape: DeltaShape) -> list[tuple[str, Any]]:
    return [
        ("T", shape.dtype),
        ("KH", shape.key_heads),
        ("VH", shape.value_heads),
        ("DK", shape.key_dim),
        ("DV", shape.value_dim),
    ]
