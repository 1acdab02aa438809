"""Our kernels for CUDA by MLX's own calls, each with the inputs and outputs of the kernel of that name.

`stand_in` puts them, or the text of the kernels on the CPU, in place of `mx.fast.cuda_kernel`, so that what drives the
kernels runs on a CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import silu
from mlx.utils import tree_flatten

from tests.support import cuda_on_cpu
from tests.support.kv_kernels import memory
from zmqengine.engine.cuda import (
    attention,
    between_products,
    draw_kernel,
    experts,
    kernel,
    kv_kernels,
    packed_attention,
    plain_products,
    quantised_products,
)
from zmqengine.engine.models.decoder_weights import Linear
from zmqengine.engine.models.ops import dequantised

Facts = dict[str, Any]
Arrays = Sequence[mx.array]


def stand_in(monkeypatch: pytest.MonkeyPatch, *, as_written: bool = False) -> list[str]:
    """Have these for kernels from now on; returns the names of those that are called.

    What a kernel is called with must be what it was compiled for. `as_written`: run the text of the kernels instead.
    These compute at once, which a trace cannot hold: `mx.compile` makes a `Replayed`.
    """
    called: list[str] = []
    launched: list[object] = []
    provided: set[tuple[str, str]] = set()

    def cuda_kernel(
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        **_: Any,
    ) -> Any:
        def call(
            *,
            inputs: Arrays,
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
        ) -> list[mx.array]:
            assert len(inputs) == len(input_names)
            assert len(output_shapes) == len(output_dtypes) == len(output_names)
            assert all(one % other == 0 for one, other in zip(grid, threadgroup, strict=True))
            given = list(zip(input_names, inputs, strict=True))
            results = list(zip(output_names, output_dtypes, strict=True))
            written = generated(name, header, source, given, results, template)
            assert written in provided
            called.append(name)
            fixed = (
                [tuple(shape) for shape in output_shapes],
                list(output_dtypes),
                list(template),
                grid,
                threadgroup,
            )
            launched.append((name, fixed))
            if as_written:
                return cuda_on_cpu.run(written[1], given, results, output_shapes, grid, threadgroup)
            made = KERNELS[name](inputs, dict(template), output_shapes)
            assert len(made) == len(output_shapes)
            for array, shape in zip(made, output_shapes, strict=True):
                assert array.size == mx.zeros(shape).size, (name, array.shape, shape)
            return [
                array.reshape(shape).astype(dtype)
                for array, shape, dtype in zip(made, output_shapes, output_dtypes, strict=True)
            ]

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(mx, "compile", lambda function: Replayed(function, launched))
    monkeypatch.setattr(kernel, "kernel_cache", lambda: Provided(provided))
    forget()
    return called


class Replayed:
    """A function as `mx.compile` has it, but called each time: what it launches must be what a trace would replay.

    It is called with arrays of one form, since MLX keeps a trace for each, for as long as the function lives.
    """

    def __init__(self, function: Callable[..., Any], launched: list[object]) -> None:
        self._function = function
        self._launched = launched
        self._trace: tuple[object, list[object]] | None = None

    def __call__(self, *given: Any) -> Any:
        before = len(self._launched)
        found = self._function(*given)
        arrays: list[tuple[str, mx.array]] = tree_flatten(given)  # type: ignore[assignment]
        called = [(array.shape, array.dtype) for _, array in arrays], self._launched[before:]
        self._trace = self._trace or called
        assert self._trace == called
        return found


class Provided:
    """A `KernelCache` that notes names and texts."""

    def __init__(self, found: set[tuple[str, str]]) -> None:
        self._found = found

    def provide(self, name: str, expression: str, source: bytes) -> None:
        """Note it."""
        assert expression == f"mlx::core::cu::{name}"
        self._found.add((name, source.decode()))

    def provide_later(self, kernels: Sequence[tuple[str, str, bytes]]) -> None:
        """Does nothing: a kernel is provided at its first use."""


def generated(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]],
) -> tuple[str, str]:
    """Name and text of a kernel by `template_arguments_hash` and `build_kernel` of mlx/backend/cuda/custom_kernel.cpp,
    line by line."""
    name = f"custom_kernel_{name}"
    for _, value in template:
        if isinstance(value, bool):
            name += "_t" if value else "_f"
        elif isinstance(value, int):
            name += f"_{value}"
        else:
            name += f"_{TYPE_STRINGS[value]}"
    text = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
    text += header
    text += "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    text += f"__global__ void {name}(\n"
    for one, array in inputs:
        text += f"    const {CUDA_TYPES[array.dtype]}* {one},\n"
        assert array.ndim > 0
        if f"{one}_shape" in source:
            text += f"    const __grid_constant__ Shape {one}_shape,\n"
        if f"{one}_strides" in source:
            text += f"    const __grid_constant__ Strides {one}_strides,\n"
        if f"{one}_ndim" in source:
            text += f"    const __grid_constant__ int {one}_ndim,\n"
    for index, (one, dtype) in enumerate(outputs):
        text += f"    {CUDA_TYPES[dtype]}* {one}"
        text += ",\n" if index < len(outputs) - 1 else ") {\n"
    for one, value in template:
        if isinstance(value, bool):
            text += f"  constexpr bool {one} = {'true' if value else 'false'};\n"
        elif isinstance(value, int):
            text += f"  constexpr int {one} = {value};\n"
        else:
            text += f"  using {one} = {CUDA_TYPES[value]};\n"
    if template:
        text += "\n"
    text += source
    text += "\n}\n\n} // namespace mlx::core::cu\n"
    return name, text


TYPE_STRINGS = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}


def forget() -> None:
    """Forget the kernels that were made: real ones are not for a CPU, and these are for no other test."""
    modules = (
        attention, between_products, draw_kernel, experts, kv_kernels, packed_attention, plain_products,
        quantised_products,
    )  # fmt: skip
    for module in modules:
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function.__module__ == module.__name__:
                function.cache_clear()


def add_and_norm(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """residual_norm.cu"""
    residual, added, weight = inputs
    assert facts["N"] == residual.shape[-1]
    assert residual.shape == added.shape
    total = residual + added
    return [total, mx.fast.rms_norm(total, weight, number(facts["EPS"]))]


def rotate(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """rotary_heads.cu, its results in arrays of their own"""
    product, offset, freqs, query_norm, key_norm = inputs
    assert product.ndim == 2
    assert facts["P"] == product.dtype
    heads, key_heads, dim, rows = facts["H"], facts["KH"], facts["D"], offset.shape[0]
    every = product.reshape(rows, -1, heads + 2 * key_heads, dim).transpose(0, 2, 1, 3)
    queries, keys, values = mx.split(every, [heads, heads + key_heads], axis=1)
    if facts["NORMS"]:
        queries = mx.fast.rms_norm(queries, query_norm, number(facts["EPS"]))
        keys = mx.fast.rms_norm(keys, key_norm, number(facts["EPS"]))
    rope: dict[str, Any] = {
        "traditional": False,
        "base": None if facts["FREQS"] else 2.0 ** number(facts["BASE"]),
        "scale": number(facts["SCALE"]),
        "offset": offset,
        "freqs": freqs if facts["FREQS"] else None,
    }
    return [mx.fast.rope(queries, facts["DIMS"], **rope), mx.fast.rope(keys, facts["DIMS"], **rope), values]


def rotate_into(inputs: Arrays, facts: Facts, shapes: Any) -> list[mx.array]:
    """rotary_heads.cu, keys and values written into arrays of the caller"""
    *own, keys, values, stop = inputs
    queries, *fresh = rotate(own, facts, shapes)
    last: Any = stop.item()
    width = queries.shape[2]
    for array, columns in zip((keys, values), fresh, strict=True):
        around(array, columns.shape[0], last)[..., last - width : last, :] = memory(columns)
    return [queries]


def around(array: mx.array, rows: int, columns: int) -> np.ndarray:
    """The memory of keys or values, of which `array` has at least the first column of the first row."""
    given = memory(array)
    shape = rows, given.shape[1], columns, given.shape[3]
    return np.lib.stride_tricks.as_strided(given, shape, given.strides)


def marks_around(hidden: mx.array, rows: int, columns: int) -> np.ndarray:
    """The marks of gaps, of which `hidden` has at least the first; one mark alone stands for none."""
    marks = memory(hidden)
    if marks.strides[0] == marks.itemsize:
        return marks
    return np.lib.stride_tricks.as_strided(marks, (rows, columns), marks.strides)


def rotate_packed(inputs: Arrays, facts: Facts, shapes: Any) -> list[mx.array]:
    """rotary_heads.cu, of tokens whose places are in a table; queries of padding are not initialised"""
    product, places, freqs, query_norm, key_norm, *arrays = inputs
    table: Any = places.reshape(-1, 4).tolist()
    assert len(table) == product.shape[0]
    table = [place for place in table if place[0] >= 0]
    positions = mx.array([position for *_, position in table])
    own = [product[: len(table)], positions, freqs, query_norm, key_norm]
    queries, *fresh = rotate(own, facts, shapes)
    columns = [memory(array) for array in fresh]
    for token, (segment, row, column, _) in enumerate(table):
        for array, given in zip(arrays[2 * segment :], columns, strict=False):
            around(array, row + 1, column + 1)[row, :, column] = given[token, :, 0]
    unused = mx.full((product.shape[0] - len(table), *shapes[0][1:]), float("nan"), queries.dtype)
    return [mx.concatenate([queries[:, :, 0], unused])]


def quantised(wide: mx.array, bits: int, group_size: int) -> Linear:
    """Weights of a product, quantised."""
    packed, scales, biases = mx.quantize(wide, group_size=group_size, bits=bits)
    return Linear(packed, None, scales, biases, None, bits, group_size, "affine")


def wide_of(linear: Linear) -> mx.array:
    """Weights of a product as they are, or dequantised in float32."""
    if linear.scales is None or linear.biases is None:
        return linear.weight
    exact = linear._replace(scales=linear.scales.astype(mx.float32), biases=linear.biases.astype(mx.float32))
    return dequantised(exact)


def new_arrays(inputs: Arrays, _: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """Arrays whose memory is not initialised."""
    assert len(inputs) == 1
    return [mx.full(shape, float("nan")) for shape in shapes]


def move_rows(inputs: Arrays, _: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """move_rows.cu"""
    keys, values, from_keys, from_values, table = inputs
    numbers: Any = table.tolist()
    for array, source in ((keys, from_keys), (values, from_values)):
        given, to = memory(source), memory(array)
        for at in range(0, len(numbers), 5):
            from_row, row, from_start, start, columns = numbers[at : at + 5]
            to[row, :, start : start + columns] = given[from_row, :, from_start : from_start + columns]
    return [mx.zeros(shapes[0])]


def attend(inputs: Arrays, _: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """ragged_attention.cu and window_attention.cu"""
    queries, keys, values, starts, stop, hidden, scale = inputs
    columns: Any = stop.item()
    rows, width = queries.shape[0], queries.shape[2]
    place = mx.arange(columns)[None, None, None]
    mask = place >= starts[:, None, None, None]
    mask = mask & (place <= (columns - width + mx.arange(width))[None, None, :, None])
    mask = mask & (mx.array(marks_around(hidden, rows, columns))[:, None, None] == 0)
    factor: Any = scale.item()
    # The kernel does not read the others, which may be NaN.
    seen = mx.any(mask, axis=2)[..., None]
    keys, values = (mx.where(seen, mx.array(around(array, rows, columns)), 0) for array in (keys, values))
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=factor, mask=mask)
    return [found.transpose(0, 2, 1, 3) if width > 1 else found]


def attend_packed(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """window_attention.cu, of blocks whose row is in a table; what no block writes is not a number"""
    queries, tiles, scale, *arrays = inputs
    heads, key_heads, dim = facts["H"], facts["KH"], facts["D"]
    made = mx.full((shapes[0][0], heads, dim), float("nan"), queries.dtype)
    rows: dict[tuple[int, ...], list[int]] = {}
    table: Any = tiles.reshape(-1, 8).tolist()
    for segment, row, first, end, width, query, token, is_apart in table:
        if width:
            rows.setdefault((segment, row, first, end, width, token, is_apart), []).append(query)
    for (segment, row, first, end, width, token, is_apart), given in rows.items():
        assert given == list(range(0, heads // key_heads * width, 64 if is_apart else 16))
        if first == end:
            made[token : token + width] = 0
            continue
        *keys_values, hidden = arrays[3 * segment : 3 * segment + 3]
        keys, values = (mx.array(around(array, row + 1, end)[row:]) for array in keys_values)
        marks = mx.array(marks_around(hidden, row + 1, end)[-1:])
        found = attend(
            [
                queries[token : token + width].transpose(1, 0, 2)[None], keys, values,
                mx.array([first]), mx.array([end]), marks, scale,
            ],
            facts,
            shapes,
        )[0]  # fmt: skip
        made[token : token + width] = found.reshape(width, heads, dim)
    return [made]


def attend_packed_in_parts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """`attend_packed` in parts of a row's columns; the first part has all of it, as in `attend_in_parts`."""
    (found,) = attend_packed(inputs, facts, shapes)
    parts = shapes[0][2]
    return [mx.pad(found[:, :, None].astype(mx.float32), [(0, 0), (0, 0), (0, parts - 1), (0, 2)])]


def attend_in_parts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """The same in parts of a row's columns, for `join_attended`: here the first one has all of it."""
    rows, width, heads, parts, _ = shapes[0]
    (found,) = attend(inputs, facts, shapes)
    first = found.reshape(rows, width, heads, 1, -1).astype(mx.float32)
    return [mx.pad(first, [(0, 0), (0, 0), (0, 0), (0, parts - 1), (0, 2)])]


def join_attended(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """ragged_attention_join.cu"""
    return [inputs[0][..., 0, : facts["D"]]]


def multiply(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """few_rows.cu with few_rows_plain.cu"""
    rows, weights = inputs
    assert rows.ndim == 2
    assert rows.dtype == weights.dtype == facts["T"]
    found = rows @ weights.T
    if facts["GATED"]:
        gate, up = mx.split(found, 2, axis=-1)
        found = silu(gate) * up
    return [found]


def route(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """experts_route.cu"""
    logits = np.array(inputs[0].astype(mx.float32))
    count, rows = facts["PER"], facts["ROWS"]
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    every, shares = shares.sum(axis=-1, keepdims=True), np.take_along_axis(shares, chosen, axis=-1)
    shares /= shares.sum(axis=-1, keepdims=True) if facts["NORMALISED"] else every
    order = np.argsort(chosen.ravel(), kind="stable")
    found = []
    for expert in range(facts["E"]):
        places = np.flatnonzero(chosen.ravel()[order] == expert)
        found += [[expert, places[at], places[at : at + rows][-1] + 1] for at in range(0, len(places), rows)]
    table = np.zeros(shapes[3], np.int32)
    table[: 3 * len(found)] = np.ravel(found)
    return [mx.array(shares.ravel()), mx.array(chosen.ravel()), mx.array(order), mx.array(table)]


def multiply_experts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """few_rows_experts.cu and few_rows.cu"""
    rows, weights, *scales, order, table = inputs
    if scales:
        packing = {"group_size": facts["GROUP"], "bits": facts["BITS"]}
        weights = mx.dequantize(weights, scales[0], scales[1], **packing)
    tiles: Any = table.reshape(-1, 3).tolist()
    found = mx.full(shapes[0], float("nan"))
    for expert, first, end in tiles:
        if end > first:
            pairs = order[first:end]
            taken, to = (
                (pairs // facts["PER"], mx.arange(first, end))
                if facts["GATED"]
                else (mx.arange(first, end), pairs)
            )
            (found[to],) = multiply([rows[taken], weights[expert]], facts, shapes)
    return [found]


def sum_experts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """experts_sum.cu"""
    made, shares = inputs
    every = made.reshape(-1, facts["PER"], facts["D"]).astype(mx.float32)
    return [(every * shares.reshape(-1, facts["PER"], 1)).sum(axis=1)]


def multiply_packed(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """quantised_product.cu, and few_rows.cu with few_rows_packed.cu"""
    rows, weight, scales, biases = inputs
    assert rows.ndim == 2
    assert rows.dtype == facts["T"]
    wide = mx.dequantize(weight, scales, biases, group_size=facts["GROUP"], bits=facts["BITS"])
    return [rows @ wide.T]


def dequantise(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """dequantise.cu"""
    weight, scales, biases = inputs
    return [mx.dequantize(weight, scales, biases, group_size=facts["GROUP"], bits=facts["BITS"])]


def number(bits: int) -> float:
    """A constant of a kernel, which is given as its bits."""
    found: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return found


KERNELS: dict[str, Callable[[Arrays, Facts, Sequence[tuple[int, ...]]], list[mx.array]]] = {
    "residual_norm": add_and_norm,
    "rotary_heads": rotate,
    "rotary_heads_into": rotate_into,
    "rotary_heads_packed": rotate_packed,
    "new_arrays": new_arrays,
    "move_rows": move_rows,
    "ragged_attention": attend,
    "ragged_attention_part": attend_in_parts,
    "ragged_attention_join": join_attended,
    "window_attention": attend,
    "window_attention_part": attend_in_parts,
    "packed_attention": attend_packed,
    "packed_attention_part": attend_packed_in_parts,
    "plain_product": multiply,
    "experts_route": route,
    "experts_product": multiply_experts,
    "experts_packed_product": multiply_experts,
    "experts_sum": sum_experts,
    "quantised_product": multiply_packed,
    "packed_product": multiply_packed,
    "dequantise": dequantise,
}
