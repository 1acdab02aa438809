"""Products with quantised weights, by the fastest way there is for the number of rows.

MLX reads quantised weights again for every row of a batch of [rows, 1, inputs], on CUDA wholly and on a CPU almost; so
a batch of 32 rows takes 24 times as long as one row. For each shape of a layer and number of rows the ways below are
timed at the start: as MLX does it; with the rows side by side as one matrix; in full width for a moment; on CUDA a
kernel of ours; and from a copy in full width where the user gives memory for it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from zmqengine.engine.autotune.variants import Product, Timing, WayTable, fastest, in_turn
from zmqengine.engine.cuda.kernel_text import kernel_text

log = logging.getLogger("zmqengine.engine")

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Numbers of rows that are measured; others take what was best for the next larger one."""

KERNEL_ROWS_MAX = 64
# Above so many rows MLX's product for CUDA is compiled first, which takes up to half a minute for each size.
_CUDA_PRODUCT_ROWS_MAX = 7
# Layers of a shape that are used in turn, as their weights must not come out of a cache.
_LAYERS_TIMED = 4

Shape = tuple[Any, ...]


def product(inputs: mx.array, layer: Any) -> mx.array:
    """As MLX does it."""
    return mx.quantized_matmul(
        inputs,
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def side_by_side(inputs: mx.array, layer: Any) -> mx.array:
    """The same with all rows in one matrix: weights are read once for several rows."""
    return product(inputs.reshape(-1, inputs.shape[-1]), layer).reshape(*inputs.shape[:-1], -1)


def widened(inputs: mx.array, layer: Any) -> mx.array:
    """The weights in full width for a moment, and an ordinary product."""
    result: mx.array = inputs @ _dequantised(layer).astype(inputs.dtype).T
    return result


def few_rows(inputs: mx.array, layer: Any) -> mx.array:
    """A kernel for CUDA that reads the weights once for up to 64 rows, and multiplies with tensor cores."""
    dim = inputs.shape[-1]
    flat = inputs.reshape(-1, dim)
    rows, outputs = flat.shape[0], layer["weight"].shape[0]
    tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
    warps = 4 if tiles == 8 else 8
    done = _kernel()(
        inputs=[flat, layer["weight"], layer["scales"], layer["biases"]],
        template=[
            ("T", inputs.dtype),
            ("BITS", layer.bits),
            ("GROUP", layer.group_size),
            ("TILES", tiles),
            ("WARPS", warps),
        ],
        grid=((outputs + 31) // 32 * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[inputs.dtype],
    )
    return done[0].reshape(*inputs.shape[:-1], outputs)  # type: ignore[no-any-return]


def from_copy(inputs: mx.array, layer: Any) -> mx.array:
    """An ordinary product with a copy of the weights in full width, which the layer keeps."""
    result: mx.array = inputs @ layer["_copy"].T
    return result


WAYS: dict[str, Product] = {
    "product": product,
    "side by side": side_by_side,
    "widened": widened,
    "kernel": few_rows,
    "copy": from_copy,
}


class MeasuredLinear(QuantizedLinear):
    """A quantised layer that goes by a table."""

    table: WayTable

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output."""
        y = self.table.multiply(x, self)
        return y + self["bias"] if "bias" in self else y


class MeasuredEmbedding(QuantizedEmbedding):
    """A quantised embedding that goes by a table where it is the model's head."""

    table: WayTable

    def as_linear(self, x: mx.array) -> mx.array:
        """The logits."""
        return self.table.multiply(x, self)


def layers_by_shape(model: Module) -> dict[Shape, list[Any]]:
    """The quantised layers of `model` that can be measured."""
    found: dict[Shape, list[Any]] = defaultdict(list)
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in (QuantizedLinear, QuantizedEmbedding, MeasuredLinear, MeasuredEmbedding):
            found[shape_of(module)].append(module)
    return dict(found)


def shape_of(layer: Any) -> Shape:
    """All that the choice for a layer depends on."""
    outputs, packed = layer["weight"].shape
    inputs = packed * 32 // layer.bits
    return (inputs, outputs, layer.bits, layer.group_size, layer.mode, str(layer["scales"].dtype))


def candidates(shape: Shape, rows: int, *, on_cuda: bool, copies: bool = False) -> Iterator[str]:
    """The names of the ways that make sense, the one that needs no proof first."""
    inputs, _, bits, group_size, mode, dtype = shape
    if not on_cuda:
        yield "product"
        if rows > 1:
            yield "side by side"
        yield "widened"
    elif rows <= _CUDA_PRODUCT_ROWS_MAX:
        yield "product"
        yield "widened"
    else:
        yield "widened"
    fits = mode == "affine" and bits in (4, 8) and group_size in (32, 64, 128) and inputs % 128 == 0
    if on_cuda and fits and rows <= KERNEL_ROWS_MAX and dtype != str(mx.float32):
        yield "kernel"
    if copies:
        yield "copy"


def measure(
    model: Module,
    *,
    on_cuda: bool,
    rows_max: int,
    copy_bytes_max: int = 0,
    until_s: float = math.inf,
    known: dict[str, str] | None = None,
    report: Callable[[float], None] = lambda fraction: None,
) -> dict[str, str]:
    """Have every quantised layer of `model` take its fastest way from now on.

    Returns what was chosen, by shape and rows.

    What is in `known`, from an earlier return, is not measured again. Copies in full width take at most
    `copy_bytes_max` bytes in all. After `until_s`, on the clock of `time.perf_counter`, nothing more is measured.
    """
    shapes = layers_by_shape(model)
    chosen: dict[str, str] = {}
    sizes = [rows for rows in ROWS if rows <= max(rows_max, 1) or rows == ROWS[-1]]
    left = copy_bytes_max
    for place, (shape, layers) in enumerate(shapes.items()):
        copied = 2 * shape[0] * shape[1] * len(layers)
        copies = 0 < copied <= left
        if copies:
            for layer in layers[:_LAYERS_TIMED]:
                _keep_copy(layer)
        names: dict[int, str] = {}
        settled = ""
        for rows in sizes:
            name = name_of(shape, rows)
            best = settled or (known or {}).get(name, "")
            if best not in WAYS or (best == "copy" and not copies):
                best, is_far_ahead = _best(shape, layers, rows, on_cuda, copies, until_s)
                # What full width gains grows with the rows.
                settled = best if best == "widened" and is_far_ahead and not on_cuda else ""
            names[rows] = best
            chosen[name] = best
        if "copy" in names.values():
            left -= copied
            for layer in layers:
                _keep_copy(layer)
        elif copies:
            for layer in layers:
                layer.pop("_copy", None)
        table = WayTable(names, WAYS)
        for layer in layers:
            layer.__class__ = MeasuredEmbedding if isinstance(layer, QuantizedEmbedding) else MeasuredLinear
            layer.table = table
        report((place + 1) / len(shapes))
    return chosen


def restore(model: Module) -> None:
    """Undo `measure`."""
    for layers in layers_by_shape(model).values():
        for layer in layers:
            layer.__class__ = QuantizedEmbedding if isinstance(layer, QuantizedEmbedding) else QuantizedLinear
            layer.pop("_copy", None)


def begin(model: Module) -> None:
    """Until they are measured, layers go by ways that need nothing compiled first, as MLX's own do on CUDA."""
    rows = _CUDA_PRODUCT_ROWS_MAX
    _follow(model, WayTable({rows: "product", rows + 1: "widened"}, WAYS))


def _follow(model: Module, table: WayTable) -> None:
    for layers in layers_by_shape(model).values():
        for layer in layers:
            layer.__class__ = MeasuredEmbedding if isinstance(layer, QuantizedEmbedding) else MeasuredLinear
            layer.table = table


def copies_bytes(model: Module) -> int:
    """What copies in full width take now."""
    return sum(
        layer["_copy"].nbytes
        for layers in layers_by_shape(model).values()
        for layer in layers
        if "_copy" in layer
    )


def name_of(shape: Shape, rows: int) -> str:
    """The shape and the number of rows, in words."""
    inputs, outputs, bits, group_size, mode, dtype = shape
    return f"{inputs}x{outputs}, {bits} bits of {mode} by {group_size}, {dtype.split('.')[-1]}, {rows} rows"


def _best(
    shape: Shape, layers: list[Any], rows: int, on_cuda: bool, copies: bool, until_s: float
) -> tuple[str, bool]:
    """The fastest way, and whether it is far ahead of the others."""
    names = list(candidates(shape, rows, on_cuda=on_cuda, copies=copies))
    if len(names) == 1 or time.perf_counter() > until_s:
        # Without a measurement the kernel stands: it was made for this, and MLX's ways fall off by factors.
        return ("kernel" if "kernel" in names and rows > 1 else names[0]), False
    some = layers[:_LAYERS_TIMED]
    dtype = some[0]["scales"].dtype
    inputs = [mx.random.normal((rows, 1, shape[0])).astype(dtype) for _ in some]
    mx.eval(inputs)

    def call(name: str) -> Callable[[], mx.array]:
        turn = in_turn(some)

        def way() -> mx.array:
            at = turn()
            return WAYS[name](inputs[at], some[at])

        return way

    # Every way starts with the same layer, so that results can be compared.
    timing: Timing = fastest({name: call(name) for name in names})
    log.debug("quantised product", extra={"shape": name_of(shape, rows), **timing.microseconds})
    others = [us for name, us in timing.microseconds.items() if name != timing.best]
    return timing.best, min(others, default=0.0) > 2 * timing.microseconds[timing.best]


def _keep_copy(layer: Any) -> None:
    if "_copy" not in layer:
        layer["_copy"] = _dequantised(layer)
        mx.eval(layer["_copy"])


def _dequantised(layer: Any) -> mx.array:
    return mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="quantised_product",
        input_names=["x", "w", "scales", "biases"],
        output_names=["out"],
        source=kernel_text("quantised_product.cu"),
        header=kernel_text("tensor_cores.cuh", "quantised_product.cuh"),
    )
