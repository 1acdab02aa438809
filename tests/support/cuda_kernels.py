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
from mlx.utils import tree_flatten

from tests.support import cuda_on_cpu
from tests.support.cuda_on_cpu import memory
from zmqengine.engine.cuda import (
    attention,
    between_products,
    draw_kernel,
    experts,
    kernel,
    plain_products,
    quantised_products,
    recurrence,
    slot_storage,
)
from zmqengine.engine.models import recurrence as recurrent
from zmqengine.engine.models.layers import Linear
from zmqengine.engine.models.ops import ACTIVATIONS, dequantised

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
    compiled = mx.compile
    monkeypatch.setattr(
        mx,
        "compile",
        # With options it is a function of mlx-lm, which may be imported only now.
        lambda function, **options: (
            compiled(function, **options) if options else Replayed(function, launched)
        ),
    )
    monkeypatch.setattr(kernel, "kernel_cache", lambda: Provided(provided))
    forget()
    return called


class Replayed:
    """A function as `mx.compile` has it, but called each time: what it launches must be what a trace would replay.

    MLX keeps a trace for each form of the arrays, for as long as the function lives.
    """

    def __init__(self, function: Callable[..., Any], launched: list[object]) -> None:
        self._function = function
        self._launched = launched
        self._traces: dict[object, list[object]] = {}

    def __call__(self, *given: Any) -> Any:
        before = len(self._launched)
        found = self._function(*given)
        arrays: list[tuple[str, mx.array]] = tree_flatten(given)  # type: ignore[assignment]
        form = tuple((array.shape, array.dtype) for _, array in arrays)
        launched = self._launched[before:]
        assert self._traces.setdefault(form, launched) == launched
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
        attention, between_products, draw_kernel, experts, plain_products, quantised_products, recurrence, slot_storage,
    )  # fmt: skip
    for module in modules:
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function.__module__ == module.__name__:
                function.cache_clear()


def add_and_norm(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """residual_norm.cu"""
    residual, added, weight, added_weight, scale = inputs
    assert facts["N"] == residual.shape[-1]
    assert residual.shape == added.shape
    if facts["ADDED_NORM"]:
        added = mx.fast.rms_norm(added, added_weight, number(facts["ADDED_EPS"]))
    total = (residual + added) * scale if facts["SCALED"] else residual + added
    return [total, mx.fast.rms_norm(total, weight, number(facts["EPS"]))]


def rotate(inputs: Arrays, facts: Facts, shapes: Any) -> list[mx.array]:
    """rotary_heads.cu; queries of padding are not initialised"""
    product, places, freqs, query_norm, key_norm, *arrays = inputs
    assert product.ndim == 2
    assert facts["P"] == product.dtype
    table: Any = places.reshape(-1, 4).tolist()
    assert len(table) == product.shape[0]
    table = [place for place in table if place[0] >= 0]
    heads, key_heads, dim, tokens = facts["H"], facts["KH"], facts["D"], len(table)
    every = product[:tokens].reshape(tokens, -1, 1, dim)
    if facts["GATED"]:
        gated, every = mx.split(every, [2 * heads], axis=1)
        every = mx.concatenate([gated[:, ::2], every], axis=1)
    assert every.shape[1] == heads + key_heads * (
        0 if facts["READS_ONLY"] else 1 if facts["KEYS_ARE_VALUES"] else 2
    )
    queries, keys, values = every[:, :heads], every[:, heads : heads + key_heads], every[:, -key_heads:]
    if facts["NORMS"]:
        queries = mx.fast.rms_norm(queries, query_norm, number(facts["EPS"]))
        keys = mx.fast.rms_norm(keys, key_norm, number(facts["EPS"]))
    if facts["VALUE_NORMS"]:
        values = mx.fast.rms_norm(values, None, number(facts["VALUE_EPS"]))
    dims = facts["DIMS"]
    rope: dict[str, Any] = {
        "traditional": facts["TRADITIONAL"],
        "base": None if facts["FREQS"] else 2.0 ** number(facts["BASE"]),
        "scale": number(facts["SCALE"]),
        "offset": mx.array([position for *_, position in table]),
        "freqs": freqs if facts["FREQS"] else None,
    }
    if dims:
        queries, keys = (
            mx.fast.rope(array.at[..., :dims].multiply(number(facts["FACTOR"])), dims, **rope)
            for array in (queries, keys)
        )
    if facts["READS_ONLY"]:
        table = []
    for token, (pool, slot, column, _) in enumerate(table):
        for array, columns in zip(arrays[2 * pool :], (keys, values), strict=False):
            around(array, slot + 1, column + 1)[slot, :, column] = memory(columns)[token, :, 0]
    unused = mx.full((len(product) - tokens, *shapes[0][1:]), float("nan"), queries.dtype)
    return [mx.concatenate([queries[:, :, 0], unused])]


def around(array: mx.array, slots: int, columns: int) -> np.ndarray:
    """The memory of keys or values, of which `array` has at least the first column of the first slot."""
    given = memory(array)
    shape = slots, given.shape[1], columns, given.shape[3]
    return np.lib.stride_tricks.as_strided(given, shape, given.strides)


def quantised(
    wide: mx.array, bits: int, group_size: int, mode: str = "affine", bias: mx.array | None = None
) -> Linear:
    """Weights of a product, quantised."""
    packed, scales, *biases = mx.quantize(wide, group_size=group_size, bits=bits, mode=mode)
    return Linear(packed, None, scales, biases[0] if biases else None, bias, bits, group_size, mode)


def wide_of(linear: Linear) -> mx.array:
    """Weights of a product as they are, or dequantised in float32."""
    if linear.scales is None:
        return linear.weight
    if linear.biases is None:
        # Exact in half precision.
        return dequantised(linear)
    exact = linear._replace(scales=linear.scales.astype(mx.float32), biases=linear.biases.astype(mx.float32))
    return dequantised(exact)


def write_columns(inputs: Arrays, _: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """write_columns.cu"""
    *arrays, columns, place = inputs
    numbers: Any = place.tolist()
    slot, start, count = numbers
    for array, own in zip(arrays, memory(columns), strict=False):
        memory(array)[slot, :, start : start + count] = own[0]
    return [mx.zeros(shapes[0])]


def read_columns(inputs: Arrays, _: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """read_columns.cu"""
    *arrays, place = inputs
    numbers: Any = place.tolist()
    slot, start, count, heads = numbers
    parts = [memory(array)[slot, :, start : start + count] for array in arrays[: shapes[0][0]]]
    assert all(len(part) == heads for part in parts)
    return [mx.array(np.stack(parts)).view(inputs[0].dtype)]


def attend(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """attention.cu; what no block writes is not a number"""
    queries, tiles, numbers, sinks, *arrays = inputs
    scale, window, cap = (float(number) for number in memory(numbers))
    heads, key_heads, dim = facts["H"], facts["KH"], facts["D"]
    attended = mx.full((shapes[0][0], heads, dim), float("nan"), queries.dtype)
    rows: dict[tuple[int, ...], list[int]] = {}
    table: Any = tiles.reshape(-1, attention.TILE).tolist()
    for pool, slot, end, width, query, token, is_apart in table:
        if width:
            rows.setdefault((pool, slot, end, width, token, is_apart), []).append(query)
    for (pool, slot, end, width, token, is_apart), begins in rows.items():
        assert begins == list(range(0, heads // key_heads * width, 64 if is_apart else 16))
        tokens = slice(token, token + width)
        if not end:
            attended[tokens] = 0
            continue
        keys, values = (
            mx.array(around(array, slot + 1, end)[slot:]) for array in arrays[2 * pool : 2 * pool + 2]
        )
        ahead = (end - width + mx.arange(width))[:, None] - mx.arange(end)
        own = queries[tokens].transpose(1, 0, 2)[None]
        keys, values = (mx.repeat(array, heads // key_heads, axis=1) for array in (keys, values))
        scores = (own @ keys.swapaxes(-1, -2)).astype(mx.float32)
        if facts["CAPPED"]:
            scores = cap * mx.tanh(scores / cap)
        scores = mx.where((ahead >= 0) & (ahead < window), scores * scale, -mx.inf)
        if facts["SINKS"]:
            sink = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:-1], 1))
            scores = mx.concatenate([scores, sink], axis=-1)
        shares = mx.softmax(scores, axis=-1)[..., :end].astype(queries.dtype)
        attended[tokens] = (shares @ values)[0].transpose(1, 0, 2)
    return [attended]


def attend_in_parts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """`attend` in parts of a row's columns, for `join_attended`: here the first one has all of it."""
    (found,) = attend(inputs, facts, shapes)
    parts = shapes[0][2]
    return [mx.pad(found[:, :, None].astype(mx.float32), [(0, 0), (0, 0), (0, parts - 1), (0, 2)])]


def join_attended(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """attention_join.cu"""
    return [inputs[0][..., 0, : facts["D"]]]


def multiply(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """few_rows.cu with few_rows_plain.cu"""
    rows, weights, bias = inputs
    assert rows.ndim == 2
    assert rows.dtype == weights.dtype == facts["T"]
    found = rows @ weights.T
    if facts["BIASED"]:
        found = found + bias
    if facts["GATED"]:
        found = ACTIVATIONS[plain_products.ACTIVATIONS[facts["GATED"]]](*mx.split(found, 2, axis=-1))
    return [found]


def route(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """experts_route.cu"""
    logits, bias, scales = (np.array(array.astype(mx.float32)) for array in inputs)
    count, rows = facts["PER"], facts["ROWS"]
    shares = (
        1 / (1 + np.exp(-logits)) if facts["SIGMOID"] else np.exp(logits - logits.max(axis=-1, keepdims=True))
    )
    ranks = shares if facts["SIGMOID"] else logits
    if facts["BIASED"]:
        ranks = ranks + bias
    chosen = np.argsort(-ranks, axis=-1, kind="stable")[:, :count]
    every, shares = shares.sum(axis=-1, keepdims=True), np.take_along_axis(shares, chosen, axis=-1)
    if facts["NORMALISED"] or not facts["SIGMOID"]:
        shares = shares / (shares.sum(axis=-1, keepdims=True) if facts["NORMALISED"] else every)
    shares = shares * (scales[chosen] if facts["SCALED"] else number(facts["SCALE"]))
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
    rows, weights, *scales, bias, order, table = inputs
    if scales:
        weights = unpacked(weights, scales, facts)
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
            own_bias = bias[expert] if facts["BIASED"] else bias
            (found[to],) = multiply([rows[taken], weights[expert], own_bias], facts, shapes)
    return [found]


def sum_experts(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """experts_sum.cu"""
    made, shares = inputs
    every = made.reshape(-1, facts["PER"], facts["D"]).astype(mx.float32)
    return [(every * shares.reshape(-1, facts["PER"], 1)).sum(axis=1)]


def multiply_packed(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """quantised_product.cu, and few_rows.cu with few_rows_packed.cu"""
    rows, weights, *scales, bias = inputs
    return multiply([rows, unpacked(weights, scales, facts), bias], {"GATED": 0, **facts}, shapes)


def dequantise(inputs: Arrays, facts: Facts, _: Any) -> list[mx.array]:
    """dequantise.cu"""
    weights, *scales = inputs
    return [unpacked(weights, scales, facts)]


def unpacked(weights: mx.array, scales: Arrays, facts: Facts) -> mx.array:
    """Quantised weights in full width."""
    packing = {"group_size": facts["GROUP"], "bits": facts["BITS"]}
    if facts["MXFP4"]:
        return mx.dequantize(weights, scales[0], mode="mxfp4", **packing)
    return mx.dequantize(weights, scales[0], scales[1], **packing)


def delta_heads(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """delta_heads.cu"""
    product, kept, places, _, conv, a_log, dt_bias, windows = inputs
    key_heads, value_heads, key_dim, value_dim = (facts[name] for name in ("KH", "VH", "DK", "DV"))
    keys, channels = key_heads * key_dim, conv.shape[0]
    gates_begin = channels + value_heads * value_dim
    heads, gates = mx.full(shapes[0], float("nan"), facts["T"]), mx.full(shapes[1], float("nan"))
    for slot, work, commit, is_first, rows in recurrent_rows(product, kept, places):
        window = slots_around(windows, slot)
        before = mx.zeros_like(windows) if is_first else mx.array(window[slot : slot + 1])
        mixed, _ = recurrent.convolved(before, rows[:, :, :channels], conv, is_activated=True)
        window[slot] = memory(mx.concatenate([before, rows[:, :commit, :channels]], axis=1))[0, commit:]
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = recurrent.normalised(*(mx.unflatten(each, 2, (key_heads, key_dim)) for each in (q, k)))
        own = slice(work, work + rows.shape[1])
        heads[own] = mx.concatenate([q.flatten(2), k.flatten(2), v], axis=-1)[0]
        b, a = mx.split(rows[:, :, gates_begin:], 2, axis=-1)
        log_decay, beta = recurrent.gates(a, b, a_log, dt_bias)
        gates[own] = mx.stack([mx.exp(log_decay), beta.astype(mx.float32)], axis=-1)[0]
    return [heads, gates]


def delta_rule(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """delta_rule.cu"""
    heads, gates, product, places, norm, states = inputs
    key_heads, value_heads, key_dim, value_dim = (facts[name] for name in ("KH", "VH", "DK", "DV"))
    keys, channels = key_heads * key_dim, heads.shape[1]
    outputs = mx.zeros(shapes[0], facts["T"])
    for slot, begin, count, _, kept_count, work, commit, is_first in pieces_of(places):
        state = slots_around(states, slot)
        now, found = mx.zeros_like(states) if is_first else mx.array(state[slot : slot + 1]), []
        for start, end in ((0, commit), (commit, kept_count + count)):
            own = slice(work + start, work + end)
            if start < end:
                q, k, v = mx.split(heads[None, own], [keys, 2 * keys], axis=-1)
                q, k = (mx.unflatten(each, 2, (key_heads, key_dim)) for each in (q, k))
                v = mx.unflatten(v, 2, (value_heads, value_dim))
                log_decay, beta = mx.log(gates[None, own, :, 0]), gates[None, own, :, 1]
                y, now = recurrent.delta_steps(q, k, v, log_decay, beta, now)
                found.append(y)
            if end == commit:
                state[slot] = memory(now)[0]
        y = mx.concatenate(found, axis=1)[:, kept_count:]
        if facts["VALUES"] == value_dim:
            z = product[None, begin : begin + count, channels : channels + value_heads * value_dim]
            y = recurrent.gated_norm(y, z.reshape(y.shape), norm, number(facts["EPS"]))
        outputs[begin : begin + count] = y[0].flatten(1)
    return [outputs]


def short_conv(inputs: Arrays, facts: Facts, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """short_conv.cu"""
    product, kept, places, _, conv, bias, windows = inputs
    outputs = mx.zeros(shapes[0], facts["T"])
    for slot, begin, count, _, kept_count, _, commit, is_first in pieces_of(places):
        (rows,) = (rows for other, _, _, _, rows in recurrent_rows(product, kept, places) if other == slot)
        window = slots_around(windows, slot)
        before = mx.zeros_like(windows) if is_first else mx.array(window[slot : slot + 1])
        added = bias if facts["BIAS"] else None
        found, _ = recurrent.short_conv(rows, before, conv, added)
        _, after = recurrent.short_conv(rows, before, conv, added, mx.array([commit]))
        window[slot] = memory(after)[0]
        outputs[begin : begin + count] = found[0, kept_count:]
    return [outputs]


def pieces_of(places: mx.array) -> list[list[int]]:
    """The pieces of rows: see recurrent_piece.cuh."""
    table: Any = places.reshape(-1, 8).tolist()
    return [piece for piece in table if piece[0] >= 0]


def recurrent_rows(
    product: mx.array, kept: mx.array, places: mx.array
) -> list[tuple[int, int, int, int, mx.array]]:
    """Slot, work row, commit, whether it is the first one of its row, and rows [1, tokens, outputs] of each piece."""
    return [
        (
            slot,
            work,
            commit,
            is_first,
            mx.concatenate(
                [kept[None, kept_begin : kept_begin + kept_count], product[None, begin : begin + count]],
                axis=1,
            ),
        )
        for slot, begin, count, kept_begin, kept_count, work, commit, is_first in pieces_of(places)
    ]


def slots_around(array: mx.array, slot: int) -> np.ndarray:
    """The memory of slots up to this one, of which `array` has the first."""
    given = memory(array)
    return np.lib.stride_tricks.as_strided(given, (slot + 1, *given.shape[1:]), given.strides)


def number(bits: int) -> float:
    """A constant of a kernel, which is given as its bits."""
    found: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return found


KERNELS: dict[str, Callable[[Arrays, Facts, Sequence[tuple[int, ...]]], list[mx.array]]] = {
    "residual_norm": add_and_norm,
    "rotary_heads": rotate,
    "read_columns": read_columns,
    "write_columns": write_columns,
    "attention": attend,
    "attention_part": attend_in_parts,
    "attention_join": join_attended,
    "plain_product": multiply,
    "experts_route": route,
    "experts_product": multiply_experts,
    "experts_packed_product": multiply_experts,
    "experts_sum": sum_experts,
    "quantised_product": multiply_packed,
    "packed_product": multiply_packed,
    "dequantise": dequantise,
    "delta_heads": delta_heads,
    "delta_rule": delta_rule,
    "short_conv": short_conv,
}
