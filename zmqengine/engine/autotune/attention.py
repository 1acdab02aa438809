"""Attention on CUDA for rows of unlike lengths, in one kernel and without a mask.

MLX's own fused kernels for CUDA take no mask when a row gives one token; with one, attention becomes eight calls a
layer, and the host is what a step waits for. Prompts go through cuDNN, which plans anew, for some 50 ms, whenever a
length is one that it has not seen; a short prompt is computed meanwhile without it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.cuda.between_products import Heads
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.models.mlx_lm import create_attention_mask, scaled_dot_product_attention

NAME = "scaled_dot_product_attention"
"""mlx-lm's models call one function by this name in their own module, so that name is what is replaced."""

_MASK_NAME = "create_attention_mask"

WIDTH_MAX = 8
"""The most tokens of a row that the kernel takes at once; more are a prompt. It reads no column before those of a row:
what a row that left has there may be no number."""

DIM_MAX = 256
"""The most dimensions of a head that it takes."""

# Products of a prompt's attention that may be made without cuDNN in each layer, and those that are made at once. More
# of them take longer than a plan.
_UNFUSED_BYTES_MAX = 256 << 20
_PART_BYTES = 64 << 20
_PART_TOKENS_MIN = 128
_EVEN_COLUMNS = 1024
_MASKS_KEPT = 16
_WARPS = 4
# Blocks that keep the device busy, and columns that are worth a block of their own.
_BLOCKS_WANTED = 256
_PART_COLUMNS_MIN = 64
_PARTS_MAX = 16
# Registers of a lane that queries may take.
_QUERY_NUMBERS_MAX = 64
# What the kernel for several tokens of a row takes: dimensions of a head, and queries of a block.
_WINDOW_DIMS = (64, 128)
_WINDOW_QUERIES = 16

# Shapes for which cuDNN has a plan or will make one.
_planned: set[tuple[int, ...]] = set()
_plans_all = ContextVar("plans_all", default=False)


def install(model: Any) -> bool:
    """Have `model` attend with what is here; False if it does not attend in the usual way."""
    found = attending_modules(model)
    for module in found:
        _replace(module, attend, mask_or_spans)
    return bool(found)


def uninstall(model: Any) -> None:
    """Undo `install`."""
    for module in attending_modules(model):
        _replace(module, scaled_dot_product_attention, create_attention_mask)


def _replace(module: ModuleType, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Both together: a model must be given no spans that attends with MLX's function."""
    setattr(module, NAME, attention)
    if getattr(module, _MASK_NAME, None) in (create_attention_mask, mask_or_spans):
        setattr(module, _MASK_NAME, mask)


def mask_or_spans(
    inputs: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False
) -> Any:
    """In place of mlx-lm's function of the same arguments: `kv.Spans` where `attend` can do with them."""
    count = inputs.shape[1]
    if type(cache) is kv.RaggedKVCache and window_size is None and not return_array and count <= WIDTH_MAX:
        spans = cache.spans(count)
        if spans is not None:
            return spans
    return create_attention_mask(inputs, cache, window_size, return_array)


def attending_modules(model: Any) -> list[ModuleType]:
    """The Python modules of which parts of `model` attend in the usual way."""
    modules = {sys.modules.get(type(part).__module__) for part in model.modules()}
    return [
        module
        for module in modules
        if module is not None and getattr(module, NAME, None) in (scaled_dot_product_attention, attend)
    ]


def attend_cached(
    function: Callable[..., mx.array],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
) -> mx.array:
    """Write keys and values, and attend to all there are with `function`, one of this name."""
    if function is attend and isinstance(mask, kv.Spans) and _fits(queries, keys, values):
        # The kernel knows where the columns end: none need be cut off.
        cache.write(keys, values)
        return ragged_attention(queries, cache.keys, cache.values, mask, scale)
    keys, values = cache.update_and_fetch(keys, values)
    return function(queries, keys, values, cache=cache, scale=scale, mask=mask)


def attend_turned(
    function: Callable[..., mx.array],
    product: mx.array,
    heads: Heads,
    width: int,
    cache: Any,
    scale: float,
    mask: Any,
) -> mx.array:
    """The same from the product that has queries, keys and values of `heads`, of so many tokens a row.

    Keys and values are written in place where the cache allows it; see the theory in `zmqengine.engine.kv`.
    """
    if function is attend and isinstance(mask, kv.Spans) and cache.can_write_here(width, heads.dtype):
        offset = cache.offset
        queries = heads.turned_into(product, offset, width, cache.keys, cache.values, mask.stop)
        begins = cache.wrote_in_place()
        attended = ragged_attention(queries, cache.keys, cache.values, mask, scale)
        if begins:
            kv.start(attended)
        return attended
    queries, keys, values = heads.turned(product, cache.offset, width)
    return attend_cached(function, queries, keys, values, cache, scale, mask)


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
        has_mask = not (mask is None or isinstance(mask, str))
        # A plan is for strides too: those of keys are given by the columns that a cache has room for.
        own = getattr(cache, "keys", None)
        room = own.shape[2] if isinstance(own, mx.array) else columns
        key = (*queries.shape, columns, room, has_mask)
        size = queries.shape[0] * queries.shape[1] * queries.shape[2] * columns * queries.itemsize
        if key not in _planned:
            if size <= _UNFUSED_BYTES_MAX and (has_mask or not _plans_all.get()):
                return _unfused(queries, keys, values, scale, mask)
            _planned.add(key)
    result: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


@contextmanager
def planning() -> Iterator[None]:
    """Let cuDNN plan for every prompt that is read meanwhile; later ones of the same shape go through it too."""
    before = _plans_all.set(True)
    try:
        yield
    finally:
        _plans_all.reset(before)


def ragged_attention(
    queries: mx.array, keys: mx.array, values: mx.array, spans: kv.Spans, scale: float, parts: int = 0
) -> mx.array:
    """Attention of `queries` [rows, heads, width, dim] over the columns of each row that `spans` names.

    The result is [rows, heads, width, dim]. `parts` is how many blocks share a row's columns; 0 for what is best.
    Several tokens of a row in half precision are multiplied with tensor cores.
    """
    call = _call(queries.dtype, queries.shape, keys.shape[1], spans.columns, parts)
    inputs = [
        queries, keys, values, spans.starts, spans.stop,
        _nothing() if spans.hidden is None else spans.hidden, _scalar(scale),
    ]  # fmt: skip
    result: mx.array = call(inputs)
    return result


class _Kernel(NamedTuple):
    """A kernel and what it is compiled for; a block needs so much shared memory."""

    name: str
    template: tuple[tuple[str, Any], ...]
    header: tuple[str, ...]
    shared_bytes: int = 0


def _call(
    dtype: mx.Dtype, shape: tuple[int, ...], key_heads: int, columns: int, parts: int
) -> Callable[[list[mx.array]], mx.array]:
    rows, heads, width, dim = shape
    group = heads // key_heads
    if width > 1 and dim in _WINDOW_DIMS and dtype != mx.float32:
        kernel = _window_kernel(dtype, dim)
        blocks = rows * key_heads, -(-group * width // _WINDOW_QUERIES)
    else:
        together = _heads_together(group, dim)
        kernel = _row_kernel(dtype, dim, together)
        blocks = rows * (heads // together), width
    return _prepared(kernel, dtype, shape, blocks, parts or _parts(math.prod(blocks), columns))


@cache
def _row_kernel(dtype: mx.Dtype, dim: int, together: int) -> _Kernel:
    return _Kernel("ragged_attention", (("T", dtype), ("D", dim), ("G", together)), ("ragged_attention.cuh",))


@cache
def _window_kernel(dtype: mx.Dtype, dim: int) -> _Kernel:
    sums_bytes, query_bytes = _WARPS * (dim + 2) * 4, dim * dtype.size
    return _Kernel(
        "window_attention",
        (("T", dtype), ("D", dim)),
        ("ragged_attention.cuh", "tensor_cores.cuh", "window_attention.cuh"),
        _WINDOW_QUERIES * (sums_bytes + query_bytes),
    )


@lru_cache(maxsize=256)
def _prepared(
    kernel: _Kernel, dtype: mx.Dtype, shape: tuple[int, ...], blocks: tuple[int, int], parts: int
) -> Callable[[list[mx.array]], mx.array]:
    """The kernel with all that is the same in every layer and step."""
    rows, heads, width, dim = shape
    whole, part, join = _kernels(kernel.name, kernel.header, kernel.shared_bytes)
    call: dict[str, Any] = {
        "template": [*kernel.template, ("SPLITS", parts), ("WARPS", _WARPS)],
        "grid": (blocks[0] * _WARPS * 32, blocks[1], parts),
        "threadgroup": (_WARPS * 32, 1, 1),
    }
    # The model wants the heads of a token side by side; of one token a row they are, and to turn it is a call.
    made = (rows, width, heads, dim) if width > 1 else shape
    if parts == 1:

        def compute(inputs: list[mx.array]) -> mx.array:
            found: mx.array = whole(inputs=inputs, output_shapes=[made], output_dtypes=[dtype], **call)[0]
            return found

    else:
        sums_shape = (rows, width, heads, parts, dim + 2)
        joined: dict[str, Any] = {
            "template": [("T", dtype), ("D", dim), ("SPLITS", parts)],
            "grid": (rows * heads * width * dim, 1, 1),
            "threadgroup": (dim, 1, 1),
            "output_shapes": [made],
            "output_dtypes": [dtype],
        }

        def compute(inputs: list[mx.array]) -> mx.array:
            sums = part(inputs=inputs, output_shapes=[sums_shape], output_dtypes=[mx.float32], **call)
            found: mx.array = join(inputs=sums, **joined)[0]
            return found

    return compute if width == 1 else lambda inputs: compute(inputs).transpose(0, 2, 1, 3)


def _fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    dim = queries.shape[3]
    alike = queries.dtype == keys.dtype == values.dtype and queries.dtype in (
        mx.bfloat16, mx.float16, mx.float32,
    )  # fmt: skip
    return alike and dim == values.shape[3] and dim % 32 == 0 and dim <= DIM_MAX


@cache
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
    rows, heads, tokens, _ = queries.shape
    if not isinstance(mask, str):
        return _products(queries, keys, values, scale, mask)
    # Few sizes: for each that is new, CUDA graphs are made anew, which takes several times as long as the chunk.
    before = keys.shape[2] - tokens
    columns = even_columns(keys.shape[2])
    spare = [(0, 0), (0, 0), (0, columns - keys.shape[2]), (0, 0)]
    keys, values = mx.pad(keys, spare), mx.pad(values, spare)
    size = max(_PART_TOKENS_MIN, _PART_BYTES // (rows * heads * columns * queries.itemsize))
    parts = [
        _products(
            queries[:, :, start : start + size],
            keys,
            values,
            scale,
            _causal(min(size, tokens - start), before + start, columns),
        )
        for start in range(0, tokens, size)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def even_columns(columns: int) -> int:
    """A power of two, or a multiple of a large one, that is not less."""
    if columns > _EVEN_COLUMNS:
        return -(-columns // _EVEN_COLUMNS) * _EVEN_COLUMNS
    return max(_EVEN_COLUMNS // 8, 1 << (columns - 1).bit_length())


def _products(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    rows, heads, tokens, dim = queries.shape
    key_heads, columns = keys.shape[1], keys.shape[2]
    group = heads // key_heads
    # Heads with the same keys stand below each other, so that there is one product for each of these and not for each
    # head.
    grouped = (queries * scale).reshape(rows, key_heads, group * tokens, dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = scores.reshape(rows, key_heads, group, tokens, columns)
        if mask.ndim > 3:
            mask = mask[:, :, None]
        is_bool = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if is_bool else scores + mask
        scores = scores.reshape(rows, key_heads, group * tokens, columns)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, tokens, values.shape[3])


@lru_cache(maxsize=_MASKS_KEPT)
def _causal(tokens: int, before: int, columns: int) -> mx.array:
    """Which of the columns each of `tokens` sees, after so many others: the same in all layers."""
    return mx.arange(before, before + tokens)[:, None] >= mx.arange(columns)


@cache
def _kernels(name: str, header: tuple[str, ...], shared_bytes: int) -> tuple[Any, Any, Any]:
    """For all columns of a row, for a part of them, and what puts parts together."""

    def kernel(suffix: str, end: str) -> Any:
        return mx.fast.cuda_kernel(
            name=name + suffix,
            input_names=["q", "k", "v", "starts", "stop", "hidden", "scale"],
            output_names=["out"],
            source=kernel_text(f"{name}.cu", end),
            header=kernel_text(*header),
            ensure_row_contiguous=False,
            shared_memory=shared_bytes,
        )

    join = mx.fast.cuda_kernel(
        name="ragged_attention_join",
        input_names=["parts"],
        output_names=["out"],
        source=kernel_text("ragged_attention_join.cu"),
    )
    return kernel("", "ragged_attention_whole.cu"), kernel("_part", "ragged_attention_part.cu"), join


@cache
def _scalar(value: float) -> mx.array:
    return resident(mx.array([value], dtype=mx.float32).view(mx.int32)).view(mx.float32)


@cache
def _nothing() -> mx.array:
    return mx.zeros((1, 1), dtype=mx.uint8)
