"""Attention on CUDA in one kernel, for rows of unlike lengths in decode and for chunks of prompts, without a mask.

Heads in half precision have the window kernel, which multiplies with tensor cores; others have one that computes each
token of a row separately, and takes two to three times as long.

MLX's own fused kernels for CUDA take no mask when a row has one token; with a mask, attention becomes eight calls a
layer, and the step is bound by the host. For prompts MLX calls cuDNN, which takes some 50 ms to plan for each new
length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import resident

ROW_WIDTH_MAX = 8
"""Maximum tokens of a row for the kernel that computes each of them separately."""

DIM_MAX = 256
"""Maximum dimensions of a head for that kernel."""

WARPS = 4
"""Warps of a thread block."""
# Thread blocks that fill the device, and the least columns for a thread block of its own.
_BLOCKS_WANTED = 256
_PART_COLUMNS_MIN = 64
_PARTS = (1, 4, 16)
# Maximum registers of a lane for queries.
_QUERY_NUMBERS_MAX = 64
# Dimensions of a head that the window kernel supports.
_WINDOW_DIMS = (64, 128)
# Queries that a warp of that kernel multiplies at a time.
_WARP_QUERIES = 16


def ragged_attention(
    queries: mx.array, keys: mx.array, values: mx.array, spans: kv.Spans, scale: float, parts: int = 0
) -> mx.array:
    """Attention of `queries` [rows, heads, width, dim] over the columns of each row in `spans`.

    Returns [rows, heads, width, dim]. `parts`: number of thread blocks that split a row's columns (split-K), one of
    `_PARTS`; 0 to choose it. Several tokens of a row in half precision use tensor cores. Columns before those of a row
    are not read: values of an earlier row there may be NaN.
    """
    parts = parts or parts_of_rows(queries.dtype, queries.shape, keys.shape[1], spans.columns)
    return attend(queries, keys, values, arrays_of(spans), scale, parts)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spans: Sequence[mx.array],
    scale: float,
    parts: int,
    *,
    flat: bool = False,
) -> mx.array:
    """`ragged_attention` with the arrays of the spans; returns [rows * width, heads * dim] if `flat`.

    Of `keys`, `values` and marks the first row and column is enough: the kernels find the others by its strides.
    """
    call = _prepared(queries.dtype, queries.shape, keys.shape[1], parts, flat)
    return call([queries, keys, values, *spans, scalar(scale)])


def arrays_of(spans: kv.Spans) -> list[mx.array]:
    """The arrays of spans that the kernels take: starts, stop, and marks."""
    return [spans.starts, spans.stop, nothing() if spans.hidden is None else spans.hidden]


class AttentionKernel(NamedTuple):
    """A kernel up to its end, which depends on the number of parts: its name, template arguments, the names and types
    of its inputs, its text and headers, and the shared memory of a thread block."""

    name: str
    template: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, mx.Dtype], ...]
    text: str
    header: tuple[str, ...]
    shared_bytes: int = 0


@lru_cache(maxsize=256)
def _kernel(
    dtype: mx.Dtype, shape: tuple[int, ...], key_heads: int
) -> tuple[AttentionKernel, tuple[int, int]]:
    """The kernel for queries of this `shape` [rows, heads, width, dim], and its thread blocks for a part of the
    columns."""
    rows, heads, width, dim = shape
    group = heads // key_heads
    if by_tensor_cores(dtype, dim):
        return _window_kernel(dtype, dim), (
            rows * key_heads,
            -(-group * width // block_queries(group * width)),
        )
    together = _heads_together(group, dim)
    return _row_kernel(dtype, dim, together), (rows * (heads // together), width)


@cache
def _inputs(dtype: mx.Dtype) -> tuple[tuple[str, mx.Dtype], ...]:
    rest = ("starts", mx.int32), ("stop", mx.int32), ("hidden", mx.uint8), ("scale", mx.float32)
    return ("q", dtype), ("k", dtype), ("v", dtype), *rest


@cache
def _row_kernel(dtype: mx.Dtype, dim: int, together: int) -> AttentionKernel:
    return AttentionKernel(
        "ragged_attention",
        (("T", dtype), ("D", dim), ("G", together)),
        _inputs(dtype),
        kernel_text("ragged_attention.cu"),
        ("ragged_attention.cuh",),
    )


@cache
def _window_kernel(dtype: mx.Dtype, dim: int) -> AttentionKernel:
    return window_kernel("window_attention", dtype, dim, _inputs(dtype), kernel_text("window_rows.cu"))


@cache
def window_kernel(
    name: str,
    dtype: mx.Dtype,
    dim: int,
    inputs: tuple[tuple[str, mx.Dtype], ...],
    begin: str,
    template: tuple[tuple[str, Any], ...] = (),
) -> AttentionKernel:
    """The window kernel; `begin` is the text that finds the row and the queries of a block."""
    sums_bytes, query_bytes = WARPS * (dim + 2) * 4, dim * dtype.size
    return AttentionKernel(
        name,
        (("T", dtype), ("D", dim), *template),
        inputs,
        begin + kernel_text("window_attention.cu"),
        ("ragged_attention.cuh", "tensor_cores.cuh", "window_attention.cuh", "prompt_attention.cuh"),
        _WARP_QUERIES * (sums_bytes + query_bytes),
    )


@lru_cache(maxsize=256)
def _prepared(
    dtype: mx.Dtype, shape: tuple[int, ...], key_heads: int, parts: int, flat: bool
) -> Callable[[list[mx.array]], mx.array]:
    """The kernel bound to the arguments that are equal in every layer and step."""
    rows, heads, width, dim = shape
    kernel, blocks = _kernel(dtype, shape, key_heads)
    # The model needs [rows, width, heads * dim]. For one token a row that is the same memory; for more, the kernel
    # writes it transposed, since a transposition is one more call.
    made = (rows, width, heads, dim) if width > 1 else shape
    if flat:
        made = rows * width, heads * dim
    variants = by_parts(kernel, dtype, dim)[parts]
    compute = in_parts(variants, blocks, parts, (rows, width, heads), dim, made)
    return compute if flat or width == 1 else lambda inputs: compute(inputs).transpose(0, 2, 1, 3)


def in_parts(
    variants: tuple[Variant, Variant],
    blocks: tuple[int, int],
    parts: int,
    queries: tuple[int, ...],
    dim: int,
    made: tuple[int, ...],
) -> Callable[[list[mx.array]], mx.array]:
    """The call of `variants`, those of `by_parts`, with the inputs of the first.

    `blocks`: thread blocks for one part of the columns. The output has the shape `made`, `dim` numbers for each of
    `queries`, the shape of the queries without their dimensions.
    """
    first, join = variants
    call: dict[str, Any] = {
        "grid": (blocks[0] * WARPS * 32, blocks[1], parts),
        "threadgroup": (WARPS * 32, 1, 1),
    }
    if parts == 1:
        return lambda inputs: first(inputs=inputs, output_shapes=[made], **call)[0]
    sums_shape = (*queries, parts, dim + 2)
    joined: dict[str, Any] = {
        "grid": (math.prod(queries) * dim, 1, 1),
        "threadgroup": (dim, 1, 1),
        "output_shapes": [made],
    }

    def compute(inputs: list[mx.array]) -> mx.array:
        sums = first(inputs=inputs, output_shapes=[sums_shape], **call)
        return join(inputs=sums, **joined)[0]

    return compute


def fits(queries: mx.array, keys: mx.array) -> bool:
    """Whether `ragged_attention` supports these queries and keys, [rows, heads, width or columns, dim]."""
    width, dim, dtype = queries.shape[2], queries.shape[3], queries.dtype
    return dtype == keys.dtype and dim == keys.shape[3] and supports(dtype, dim, width)


def supports(dtype: mx.Dtype, dim: int, width: int) -> bool:
    """Whether `ragged_attention` supports `width` queries of a row, of heads with `dim` dimensions."""
    if by_tensor_cores(dtype, dim):
        return True
    known = dtype in (mx.bfloat16, mx.float16, mx.float32)
    return known and dim % 32 == 0 and dim <= DIM_MAX and width <= ROW_WIDTH_MAX


def by_tensor_cores(dtype: mx.Dtype, dim: int) -> bool:
    """Whether `window_kernel` supports heads of this type and these dimensions."""
    return dim in _WINDOW_DIMS and dtype in (mx.bfloat16, mx.float16)


@cache
def _heads_together(group: int, dim: int) -> int:
    """Maximum heads with the same keys for one thread block."""
    most = max(1, _QUERY_NUMBERS_MAX * 8 // dim)
    return max(count for count in range(1, group + 1) if group % count == 0 and count <= most)


def block_queries(queries: int) -> int:
    """Queries of a thread block of the window kernel, by those of the row.

    Where there are enough for all warps, each has its own: a block reads the keys and values once for all of them.
    """
    return WARPS * _WARP_QUERIES if queries >= WARPS * _WARP_QUERIES else _WARP_QUERIES


def parts_of_rows(dtype: mx.Dtype, shape: tuple[int, ...], key_heads: int, columns: int) -> int:
    """`parts_of` the kernel for queries of this `shape` [rows, heads, width, dim]."""
    rows, heads, width, dim = shape
    if by_tensor_cores(dtype, dim):
        return parts_of(rows * key_heads * -(-heads // key_heads * width // _WARP_QUERIES), columns)
    return parts_of(math.prod(_kernel(dtype, shape, key_heads)[1]), columns)


def every_parts_of_rows(dtype: mx.Dtype, shape: tuple[int, ...], key_heads: int) -> list[int]:
    """The results of `parts_of_rows` for any number of columns."""
    columns = 0, *(4 * parts * _PART_COLUMNS_MIN for parts in _PARTS)
    return [*dict.fromkeys(parts_of_rows(dtype, shape, key_heads, count) for count in columns)]


def parts_of(blocks: int, columns: int) -> int:
    """Number of thread blocks that split a row's columns: one of a few, since a kernel is compiled for each.

    `blocks`: thread blocks for all columns; one whose warps have queries of their own counts for each warp.
    """
    for parts in _PARTS:
        if blocks * parts >= _BLOCKS_WANTED or columns < 4 * parts * _PART_COLUMNS_MIN:
            return parts
    return _PARTS[-1]


@cache
def by_parts(kernel: AttentionKernel, dtype: mx.Dtype, dim: int) -> dict[int, tuple[Variant, Variant]]:
    """The kernel by number of parts: for all columns of a row or a part of them, and for the reduction of the parts.

    All at once, since traffic needs the other numbers later, when to compile one would be a pause.
    """
    join = Kernel(
        name="ragged_attention_join",
        input_names=["parts"],
        output_names=["out"],
        source=kernel_text("ragged_attention_join.cu"),
    )
    whole = _attending(kernel, "", "ragged_attention_whole.cu", dtype, 1)
    found = {1: (whole, whole)}
    for parts in _PARTS[1:]:
        part = _attending(kernel, "_part", "ragged_attention_part.cu", mx.float32, parts)
        template = [("T", dtype), ("D", dim), ("SPLITS", parts)]
        found[parts] = part, join.variant(template, [mx.float32], [dtype])
    return found


def _attending(kernel: AttentionKernel, suffix: str, end: str, made: mx.Dtype, parts: int) -> Variant:
    found = Kernel(
        name=kernel.name + suffix,
        input_names=[one for one, _ in kernel.inputs],
        output_names=["out"],
        source=kernel.text + kernel_text(end),
        header=kernel_text(*kernel.header),
        ensure_row_contiguous=False,
        shared_memory=kernel.shared_bytes,
    )
    template = [*kernel.template, ("SPLITS", parts), ("WARPS", WARPS)]
    return found.variant(template, [kind for _, kind in kernel.inputs], [made])


@cache
def scalar(value: float) -> mx.array:
    """A number as an array on the device, made once."""
    made = resident(mx.array([value], dtype=mx.float32).view(mx.int32)).view(mx.float32)
    # Evaluated here: a trace would contain the operations of an array that is not.
    mx.eval(made)
    return made


@cache
def nothing() -> mx.array:
    """Marks of no column, for rows without gaps."""
    return mx.zeros((1, 1), dtype=mx.uint8)
