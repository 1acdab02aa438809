"""Attention on CUDA for rows of unlike lengths, in one kernel and without a mask.

MLX's own fused kernels for CUDA take no mask when a row gives one token; with one, attention becomes eight calls a
layer, and the host is what a step waits for. Prompts go through cuDNN, which plans anew, for some 50 ms, whenever a
length is one that it has not seen; a short prompt is computed meanwhile without it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.kernels.kernel_text import kernel_text
from zmqengine.engine.mlx_lm_border import scaled_dot_product_attention

WIDTH_MAX = 8
"""The most tokens of a row that the kernel takes at once; more are a prompt."""

# Products and weights of a prompt's attention that may be made at once without cuDNN, for each layer.
_UNFUSED_BYTES_MAX = 256 << 20
_WARPS = 4
# Blocks that keep the device busy, and columns that are worth a block of their own.
_BLOCKS_WANTED = 256
_PART_COLUMNS_MIN = 64
_PARTS_MAX = 16
# Registers of a lane that queries may take.
_QUERY_NUMBERS_MAX = 64

_planned: set[tuple[int, ...]] = set()


def works_here() -> bool:
    """Whether this is MLX for CUDA, on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()


def install(model: Any) -> bool:
    """Have `model` attend with what is here; False if it does not attend in the usual way.

    mlx-lm's models call one function by its name in their own module, so that name is what is replaced.
    """
    modules = {sys.modules.get(type(part).__module__) for part in model.modules()}
    found = [
        module
        for module in modules
        if getattr(module, "scaled_dot_product_attention", None) in (scaled_dot_product_attention, attend)
    ]
    for module in found:
        module.scaled_dot_product_attention = attend  # type: ignore[union-attr]
    kv.RaggedKVCache.spans_width = WIDTH_MAX if found else 0
    return bool(found)


def uninstall(model: Any) -> None:
    """Undo `install`."""
    kv.RaggedKVCache.spans_width = 0
    for part in model.modules():
        module = sys.modules.get(type(part).__module__)
        if getattr(module, "scaled_dot_product_attention", None) is attend:
            module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[union-attr]


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """In place of mlx-lm's function of the same arguments; `mask` may be `kv.Spans`."""
    if isinstance(mask, kv.Spans):
        if sinks is None and _fits(queries, keys, values):
            return ragged_attention(queries, keys, values, mask, scale)
        mask = mask.as_mask()
    elif sinks is None and queries.shape[2] > WIDTH_MAX and not hasattr(cache, "bits"):
        columns = keys.shape[2]
        key = (*queries.shape, columns, 0 if mask is None or isinstance(mask, str) else 1)
        size = queries.shape[0] * queries.shape[1] * queries.shape[2] * columns * queries.itemsize
        if key not in _planned:
            if size <= _UNFUSED_BYTES_MAX:
                return _unfused(queries, keys, values, scale, mask)
            _planned.add(key)
    result: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


def plan_prompts(heads: int, head_dim: int, lengths: list[tuple[int, int]]) -> None:
    """Let prompts of one row with these (tokens, columns) go through cuDNN. The next of each takes longer."""
    for tokens, columns in lengths:
        _planned.add((1, heads, tokens, head_dim, columns, 0))


def ragged_attention(
    queries: mx.array, keys: mx.array, values: mx.array, spans: kv.Spans, scale: float, parts: int = 0
) -> mx.array:
    """Attention of `queries` [rows, heads, width, dim] over the columns of each row that `spans` names.

    The result is [rows, heads, width, dim]. `parts` is how many blocks share a row's columns; 0 for what is best.
    """
    rows, heads, width, dim = queries.shape
    key_heads, columns = keys.shape[1], keys.shape[2]
    together = _heads_together(heads // key_heads, dim)
    blocks = rows * (heads // together)
    parts = parts or _parts(blocks * width, columns)
    template = [
        ("T", queries.dtype),
        ("D", dim),
        ("G", together),
        ("SPLITS", parts),
        ("WARPS", _WARPS),
        ("HOLES", spans.hidden is not None),
    ]
    inputs = [
        queries, keys, values, spans.starts, spans.stop,
        _nothing() if spans.hidden is None else spans.hidden, _scalar(scale),
    ]  # fmt: skip
    call: dict[str, Any] = {
        "inputs": inputs,
        "template": template,
        "grid": (blocks * _WARPS * 32, width, parts),
        "threadgroup": (_WARPS * 32, 1, 1),
    }
    whole, part, join = _kernels()
    if parts == 1:
        done = whole(output_shapes=[queries.shape], output_dtypes=[queries.dtype], **call)
    else:
        shape = (rows, heads, width, parts, dim + 2)
        sums = part(output_shapes=[shape], output_dtypes=[mx.float32], **call)
        done = join(
            inputs=sums,
            template=[("T", queries.dtype), ("D", dim), ("SPLITS", parts)],
            grid=(rows * heads * width * dim, 1, 1),
            threadgroup=(dim, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[queries.dtype],
        )
    result: mx.array = done[0]
    return result


def _fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    dim = queries.shape[3]
    alike = queries.dtype == keys.dtype == values.dtype and queries.dtype in (
        mx.bfloat16, mx.float16, mx.float32,
    )  # fmt: skip
    return alike and dim == values.shape[3] and dim % 32 == 0 and dim <= 256


def _heads_together(group: int, dim: int) -> int:
    """The most heads with the same keys that a block can take."""
    most = max(1, _QUERY_NUMBERS_MAX * 8 // dim)
    return max(count for count in range(1, group + 1) if group % count == 0 and count <= most)


def _parts(blocks: int, columns: int) -> int:
    """How many blocks may share a row's columns: 1, 4 or 16, as a kernel is compiled for each."""
    parts = 1
    while parts < _PARTS_MAX and blocks * parts < _BLOCKS_WANTED and columns >= 4 * parts * _PART_COLUMNS_MIN:
        parts *= 4
    return parts


def _unfused(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention as products and a softmax: what MLX does itself where it has no kernel."""
    rows, heads, tokens, dim = queries.shape
    key_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(rows, key_heads, heads // key_heads, tokens, dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = mx.arange(columns - tokens, columns)[:, None] >= mx.arange(columns)
    if mask is not None:
        if mask.ndim > 3:
            mask = mask[:, :, None]
        is_bool = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if is_bool else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(rows, heads, tokens, values.shape[3])


@cache
def _kernels() -> tuple[Any, Any, Any]:
    names = ["q", "k", "v", "starts", "stop", "hidden", "scale"]
    kernel = mx.fast.cuda_kernel
    return (
        kernel(
            name="ragged_attention",
            input_names=names,
            output_names=["out"],
            source=kernel_text("ragged_attention.cu", "ragged_attention_whole.cu"),
            ensure_row_contiguous=False,
        ),
        kernel(
            name="ragged_attention_part",
            input_names=names,
            output_names=["out"],
            source=kernel_text("ragged_attention.cu", "ragged_attention_part.cu"),
            ensure_row_contiguous=False,
        ),
        kernel(
            name="ragged_attention_join",
            input_names=["parts"],
            output_names=["out"],
            source=kernel_text("ragged_attention_join.cu"),
        ),
    )


@cache
def _scalar(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


@cache
def _nothing() -> mx.array:
    return mx.zeros((1, 1), dtype=mx.uint8)
