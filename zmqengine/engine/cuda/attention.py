"""The attention kernel: all pieces of a step, a few tokens of a row or many, by tensor cores, without a mask.

MLX's own fused kernels for CUDA take no mask when a row has one token; with a mask, attention becomes eight calls a
layer, and the step is bound by the host. For prompts MLX calls cuDNN, which takes some 50 ms to plan for each new
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

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
# Dimensions of a head that the kernel supports.
_DIMS = (64, 128)
# Queries that a warp multiplies at a time.
_WARP_QUERIES = 16


def attend(
    heads: HeadShape, parts: int, queries: mx.array, tiles: mx.array, keys_values: Sequence[mx.array]
) -> mx.array:
    """Attention [tokens, heads * dim] of `queries` [tokens, heads, dim]; `parts`: those of a row's columns."""
    first, join = _variants(heads.dtype, heads.heads, heads.key_heads, heads.dim)[parts]
    tokens, dim = queries.shape[0], heads.dim
    outputs = (tokens, heads.heads * dim)
    (found,) = first(
        inputs=[queries, tiles, _scalar(heads.scale), *keys_values],
        grid=(tiles.size // TILE * heads.key_heads * WARPS * 32, 1, parts),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[outputs if parts == 1 else (tokens, heads.heads, parts, dim + 2)],
    )
    if parts == 1:
        return found
    return join(
        inputs=[found],
        grid=(tokens * heads.heads * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[outputs],
    )[0]


def supports(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernel supports heads of this type and these dimensions."""
    return dim in _DIMS and dtype in (mx.bfloat16, mx.float16)


def block_queries(queries: int) -> int:
    """Queries of a thread block, by those of the row.

    Where there are enough for all warps, each has its own: a block reads the keys and values once for all of them.
    """
    return WARPS * _WARP_QUERIES if queries >= WARPS * _WARP_QUERIES else _WARP_QUERIES


def every_parts(blocks: int) -> list[int]:
    """The results of `parts_of` as many `blocks` for any number of columns."""
    columns = 0, *(4 * parts * _PART_COLUMNS_MIN for parts in _PARTS)
    return [*dict.fromkeys(parts_of(blocks, count) for count in columns)]


def parts_of(blocks: int, columns: int) -> int:
    """Number of thread blocks that split a row's columns: one of a few, since a kernel is compiled for each.

    `blocks`: thread blocks for all columns; one whose warps have queries of their own counts for each warp.
    """
    for parts in _PARTS:
        if blocks * parts >= _BLOCKS_WANTED or columns < 4 * parts * _PART_COLUMNS_MIN:
            return parts
    return _PARTS[-1]


@lru_cache(maxsize=16)
def _variants(dtype: mx.Dtype, heads: int, key_heads: int, dim: int) -> Mapping[int, tuple[Variant, Variant]]:
    """The kernel by number of parts: for all columns of a row or a part of them, and for the reduction of the parts.

    All at once, since traffic needs the other numbers later, when to compile one would be a pause.
    """
    template = (("T", dtype), ("D", dim), ("H", heads), ("KH", key_heads), ("WARPS", WARPS))
    join = Kernel(
        name="attention_join",
        input_names=["parts"],
        output_names=["out"],
        source=kernel_text("attention_join.cu"),
    )
    whole = _variant("attention", "attention_whole.cu", template, 1, dtype)
    variants = {1: (whole, whole)}
    for parts in _PARTS[1:]:
        part = _variant("attention_part", "attention_part.cu", template, parts, mx.float32)
        joined = join.variant([("T", dtype), ("D", dim), ("SPLITS", parts)], [mx.float32], [dtype])
        variants[parts] = part, joined
    return variants


def _variant(
    name: str, end: str, template: tuple[tuple[str, Any], ...], parts: int, output: mx.Dtype
) -> Variant:
    _, dtype = template[0]
    dim = dict(template)["D"]
    pools = [f"{kind}{number}" for number in range(POOLS_MAX) for kind in ("k", "v")]
    sums_bytes, query_bytes = WARPS * (dim + 2) * 4, dim * dtype.size
    kernel = Kernel(
        name=name,
        input_names=["q", "tiles", "scale", *pools],
        output_names=["out"],
        source=for_each(kernel_text("attention.cu", end), POOLS_MAX),
        header=kernel_text("join_warps.cuh", "tensor_cores.cuh", "few_queries.cuh", "many_queries.cuh"),
        ensure_row_contiguous=False,
        shared_memory=_WARP_QUERIES * (sums_bytes + query_bytes),
    )
    inputs = [dtype, mx.int32, mx.float32, *[dtype] * len(pools)]
    return kernel.variant([*template, ("SPLITS", parts)], inputs, [output])


@lru_cache(maxsize=16)
def _scalar(value: float) -> mx.array:
    """A number as an array on the device, made once."""
    array = resident(mx.array([value], dtype=mx.float32).view(mx.int32)).view(mx.float32)
    # Evaluated here: a trace would contain the operations of an array that is not.
    mx.eval(array)
    return array
