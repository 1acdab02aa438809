"""The attention kernel: all pieces of a step, a few tokens of a row or many, by tensor cores, without a mask.

MLX's own fused kernels for CUDA take no mask when a row has one token; with a mask, attention becomes eight calls a
layer, and the step is bound by the host. For prompts MLX calls cuDNN, which takes some 50 ms to plan for each new
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.kv.slots import POOLS_MAX
from zmqengine.engine.models.layers import HeadShape

WARPS = 4
"""Warps of a thread block."""
TILE = 7
"""Numbers of a tile, a thread block for each head of keys: see attention.cu."""
# Thread blocks that fill the device, and the least columns for a thread block of its own.
_BLOCKS_WANTED = 256
_PART_COLUMNS_MIN = 64
_PARTS = (1, 4, 16)
# Dimensions of a head that the kernel supports, and of values that a thread block makes of them.
_DIMS = {64: 64, 128: 128, 256: 256, 512: 128}
# Columns of keys and of values that a thread block copies ahead twice, where each warp has its own queries; and the
# dimensions up to which these are in registers.
_COPIED_COLUMNS, _HELD_DIM_MAX = 32, 128
# A window for rows of any length, which a float holds exactly.
_NO_WINDOW = 1 << 30
SPLIT_COLUMNS = tuple(4 * parts * _PART_COLUMNS_MIN for parts in _PARTS[:-1])
"""Columns of a row from which it may be split into the next number of parts."""
# Queries that a warp multiplies at a time.
_WARP_QUERIES = 16
BLOCK_QUERIES_MAX = WARPS * _WARP_QUERIES
"""Maximum queries of a thread block."""


def attend(
    heads: HeadShape, parts: int, queries: mx.array, tiles: mx.array, keys_values: Sequence[mx.array]
) -> mx.array:
    """Attention [tokens, heads * dim] of `queries` [tokens, heads, dim]; `parts`: those of a row's columns."""
    tokens, dim = queries.shape[0], heads.dim
    facts = _facts(heads.scale, heads.window, heads.cap)
    sinks = facts if heads.sinks is None else heads.sinks
    variants = _variants(_heads_kind(heads))
    outputs = (tokens, heads.heads * dim)
    (found,) = (variants.whole if parts == 1 else variants.part)(
        inputs=[queries, tiles, facts, sinks, *keys_values],
        grid=(tiles.size // TILE * heads.key_heads * WARPS * 32, dim // _DIMS[dim], parts),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[outputs if parts == 1 else (tokens, heads.heads, parts, dim + 2)],
    )
    if parts == 1:
        return found
    return variants.join(
        inputs=[found, sinks],
        grid=(tokens * heads.heads * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[outputs],
    )[0]


def supports(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernel supports heads of this type and these dimensions."""
    return dim in _DIMS and dtype in (mx.bfloat16, mx.float16)


def block_queries(queries: int, dim: int) -> int:
    """Queries of a thread block, by those of the row and the dimensions of a head.

    Where there are enough for all warps, each has its own: a block reads the keys and values once for all of them.
    """
    are_apart = queries >= BLOCK_QUERIES_MAX and _DIMS[dim] == dim
    return BLOCK_QUERIES_MAX if are_apart else _WARP_QUERIES


def blocks_of(tiles: int, key_heads: int, dim: int) -> int:
    """Thread blocks of a number of tiles, for all columns of a row."""
    return tiles * key_heads * (dim // _DIMS[dim])


def parts_of(blocks: int, columns: int) -> int:
    """Number of thread blocks that split a row's columns: one of a few, since a step is traced for each.

    `blocks`: thread blocks for all columns; one whose warps have queries of their own counts for each warp.
    """
    for parts, split in zip(_PARTS, SPLIT_COLUMNS, strict=False):
        if blocks * parts >= _BLOCKS_WANTED or columns < split:
            return parts
    return _PARTS[-1]


class _HeadsKind(NamedTuple):
    """A shape of heads as a kernel is compiled for it."""

    dtype: mx.Dtype
    dim: int
    heads: int
    key_heads: int
    sinks: mx.Dtype | None
    is_capped: bool

    @property
    def template(self) -> list[tuple[str, Any]]:
        """Template arguments of both kernels."""
        return [("T", self.dtype), ("D", self.dim), ("H", self.heads), ("SINKS", self.sinks is not None)]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: sums of all warps' queries, in the same place columns before, and queries
        beside them; at most 97 KiB."""
        values, size = _DIMS[self.dim], self.dtype.size
        sums = WARPS * _WARP_QUERIES * (values + 2) * 4
        assert values < self.dim or 4 * _COPIED_COLUMNS * self.dim * size <= sums
        warps = WARPS if _HELD_DIM_MAX < self.dim == values else 1
        return sums + warps * _WARP_QUERIES * self.dim * size


def _heads_kind(heads: HeadShape) -> _HeadsKind:
    sinks = None if heads.sinks is None else heads.sinks.dtype
    return _HeadsKind(heads.dtype, heads.dim, heads.heads, heads.key_heads, sinks, heads.cap is not None)


class _Variants(NamedTuple):
    """The kernel for all columns of a row, for a part of them, and for the reduction of the parts."""

    whole: Variant
    part: Variant
    join: Variant


@lru_cache(maxsize=16)
def _variants(kind: _HeadsKind) -> _Variants:
    """The variants of a kind, all at once: traffic needs the others later, when to compile one would be a pause."""
    join = Kernel(
        name="attention_join",
        input_names=["parts", "sinks"],
        output_names=["out"],
        source=kernel_text("attention_join.cu"),
        header=kernel_text("join_warps.cuh"),
    )
    return _Variants(
        _variant("attention", "attention_whole.cu", kind, kind.dtype),
        _variant("attention_part", "attention_part.cu", kind, mx.float32),
        join.variant(kind.template, [mx.float32, kind.sinks or mx.float32], [kind.dtype]),
    )


def _variant(name: str, end: str, kind: _HeadsKind, output: mx.Dtype) -> Variant:
    pools = [f"{array}{number}" for number in range(POOLS_MAX) for array in ("k", "v")]
    kernel = Kernel(
        name=name,
        input_names=["q", "tiles", "facts", "sinks", *pools],
        output_names=["out"],
        source=for_each(kernel_text("attention.cu", end), POOLS_MAX),
        header=kernel_text("join_warps.cuh", "tensor_cores.cuh", "few_queries.cuh", "many_queries.cuh"),
        ensure_row_contiguous=False,
        shared_memory=kind.shared_bytes,
    )
    template = [
        *kind.template,
        ("V", _DIMS[kind.dim]),
        ("KH", kind.key_heads),
        ("WARPS", WARPS),
        ("CAPPED", kind.is_capped),
    ]
    inputs = [kind.dtype, mx.int32, mx.float32, kind.sinks or mx.float32, *[kind.dtype] * len(pools)]
    return kernel.variant(template, inputs, [output])


@lru_cache(maxsize=16)
def _facts(scale: float, window: int | None, cap: float | None) -> mx.array:
    """The `facts` of attention.cu as an array on the device, made once."""
    numbers = [scale, _NO_WINDOW if window is None else window, 0.0 if cap is None else cap / scale]
    array = resident(mx.array(numbers, dtype=mx.float32).view(mx.int32)).view(mx.float32)
    # Evaluated here: a trace would contain the operations of an array that is not.
    mx.eval(array)
    return array
