"""Products with weights in full width, by the fastest way for the number of rows.

On CUDA MLX has a kernel for one row and takes cuBLAS for several, which costs the host twice the time of starting a
kernel: 129 products a step of an 8B model; and 10 to 40 ms for a step with a number of rows that it has not met, as
batches that draft come to have them. For up to 40 rows a kernel of ours reads the weights once, as fast as memory gives
them, and on a Hopper another one, which is for any number. For each shape of a layer and number of rows the ways are
timed at the start.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from zmqengine.engine.autotune.variants import Product, Way, WayTable, fastest, same_but_for_rounding
from zmqengine.engine.cuda import plain_products
from zmqengine.engine.host import backend

ROWS = (8, 16, 32, 40, 80, 160, 256)
"""Numbers of rows that are measured; others take what was best for the next larger one, and more than these cuBLAS."""

# A kernel that is slower by no more than this is worth it, as the host starts it in half the time. With more rows each
# number of them is rare, and cuBLAS dear to begin with.
_LOSS_MAX = 1.05
_RARE_LOSS_MAX = 1.25
# Layers of a shape that are used in turn, as their weights must not come out of a cache.
_LAYERS_TIMED = 4
_CALLS_EACH = 4
# All outputs of a way are there at once, and those of another one.
_OUTPUTS_BYTES_MAX = 128 << 20

Shape = tuple[int, int, str]


class TurnedLinear(Linear):
    """A layer that keeps a view of its weights as its product needs them, instead of making one in every step."""

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output."""
        return turned(x, self)


class MeasuredLinear(TurnedLinear):
    """Such a layer that goes by a table."""

    table: WayTable

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output."""
        return self.table.multiply(x, self)


class MeasuredEmbedding(Embedding):
    """An embedding that goes by a table where it is the model's head."""

    table: WayTable

    def as_linear(self, x: mx.array) -> mx.array:
        """The logits."""
        return self.table.multiply(x, self)


def turned(inputs: mx.array, layer: Any) -> mx.array:
    """As MLX does it."""
    weights = layer["_turned"]
    return mx.addmm(layer["bias"], inputs, weights) if "bias" in layer else inputs @ weights


def few_rows(inputs: mx.array, layer: Any) -> mx.array:
    """By a kernel for CUDA and up to 40 rows."""
    return _by_kernel(plain_products.few_rows, inputs, layer)


def many_rows(inputs: mx.array, layer: Any) -> mx.array:
    """By a kernel for a Hopper and any number of rows."""
    return _by_kernel(plain_products.many_rows, inputs, layer)


def in_parts(inputs: mx.array, layer: Any) -> mx.array:
    """The output of any linear layer for `inputs` [rows, inputs]: [rows, outputs]; or where that is less work in parts
    that are yet to be added, [parts, rows, outputs] in float32."""
    if _way(inputs, layer) is many_rows:
        return plain_products.parts_of_many_rows(inputs, layer.weight)
    output: mx.array = layer(inputs)
    return output


def gated(inputs: mx.array, layer: Any) -> mx.array:
    """Of the outputs of any linear layer for `inputs` [rows, inputs] silu of the first half times the other half:
    [rows, outputs / 2]."""
    way, found = _way(inputs, layer), None
    if way is few_rows:
        found = plain_products.few_rows(inputs, layer.weight, gated=True)
    elif way is many_rows:
        found = plain_products.many_rows_gated(inputs, layer.weight)
    if found is None:
        gate, up = mx.split(layer(inputs), 2, axis=-1)
        found = silu(gate) * up
    return found


def _way(inputs: mx.array, layer: Any) -> Product | None:
    """By which of `WAYS` such a product is made; None if that is not all there is to it."""
    is_plain = type(layer) is MeasuredLinear and "bias" not in layer and inputs.dtype == layer.weight.dtype
    return layer.table.way(inputs.shape[0]) if is_plain else None


def _by_kernel(kernel: Callable[[mx.array, mx.array], mx.array], inputs: mx.array, layer: Any) -> mx.array:
    weights = layer["weight"]
    if inputs.dtype != weights.dtype:
        return turned(inputs, layer)
    found = kernel(inputs.reshape(-1, inputs.shape[-1]), weights).reshape(*inputs.shape[:-1], -1)
    return found + layer["bias"] if "bias" in layer else found


WAYS: dict[str, Product] = {"product": turned, "kernel": few_rows, "wide kernel": many_rows}


def turn_weights(model: Any) -> None:
    """Let every plain linear layer of `model` keep a view of its weights as products need them."""
    for module in model.modules():
        if type(module) is Linear:
            _turn(module)
            module.__class__ = TurnedLinear


def turn_back(model: Any) -> None:
    """Undo `turn_weights`."""
    for module in model.modules():
        if type(module) is TurnedLinear:
            module.__class__ = Linear  # type: ignore[assignment]
            del module["_turned"]


def measure(
    model: Module,
    *,
    until_s: float,
    known: dict[str, str],
    report: Callable[[float], None] = lambda fraction: None,
) -> dict[str, str]:
    """Have every layer of `model` whose weights are in half precision take its faster way from now on.

    Returns what was chosen, by shape and rows. What is in `known`, from an earlier return, is not measured again. After
    `until_s`, on the clock of `time.perf_counter`, nothing more is measured.
    """
    shapes = layers_by_shape(model)
    chosen: dict[str, str] = {}
    for place, (shape, layers) in enumerate(shapes.items()):
        for layer in layers:
            _turn(layer)
        names = {1: "product"}
        for rows in ROWS:
            name = name_of(shape, rows)
            best = known.get(name, "")
            ways = _candidates(shape, rows)
            if best not in ways and time.perf_counter() < until_s:
                best = _best(layers, rows, ways)
            if best in ways:
                names[rows] = chosen[name] = best
        table = WayTable({**names, max(names) + 1: "product"}, WAYS)
        for layer in layers:
            layer.__class__ = MeasuredEmbedding if isinstance(layer, Embedding) else MeasuredLinear
            layer.table = table
        report((place + 1) / len(shapes))
    return chosen


def restore(model: Module) -> None:
    """Undo `measure`."""
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in (MeasuredLinear, MeasuredEmbedding):
            module.__class__ = Embedding if isinstance(module, Embedding) else Linear
            del module["_turned"]


def layers_by_shape(model: Module) -> dict[Shape, list[Any]]:
    """The layers of `model` that the kernel can multiply."""
    found: dict[Shape, list[Any]] = defaultdict(list)
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in (Linear, TurnedLinear, MeasuredLinear, Embedding, MeasuredEmbedding):
            weights: Any = module["weight"]
            outputs, inputs = weights.shape
            if weights.dtype in (mx.bfloat16, mx.float16) and inputs % plain_products.PART == 0:
                found[inputs, outputs, str(weights.dtype).split(".")[-1]].append(module)
    return dict(found)


def name_of(shape: Shape, rows: int) -> str:
    """The shape and the number of rows, in words."""
    inputs, outputs, dtype = shape
    return f"{inputs}x{outputs}, {dtype}, {rows} rows"


def _best(layers: list[Any], rows: int, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    some = layers[:_LAYERS_TIMED]
    weights = some[0]["weight"]
    outputs_bytes = rows * weights.shape[0] * weights.itemsize * len(some)
    calls_each = max(1, min(_CALLS_EACH, _OUTPUTS_BYTES_MAX // outputs_bytes))
    inputs = [mx.random.normal((rows, 1, weights.shape[1])).astype(weights.dtype) for _ in some] * calls_each
    mx.eval(inputs)

    def calls(way: Product) -> Way:
        # As in a step: what Python does for a call is done once.
        traced = mx.compile(
            lambda *given: [way(one, some[place % len(some)]) for place, one in enumerate(given)]
        )
        return lambda: traced(*inputs)

    found = fastest({name: calls(WAYS[name]) for name in names}, calls=1, agree=_all_alike).microseconds
    kernel = min((name for name in found if name != "product"), key=found.__getitem__, default="product")
    loss_max = _LOSS_MAX if rows <= plain_products.FEW_ROWS_MAX else _RARE_LOSS_MAX
    return kernel if found[kernel] <= loss_max * found["product"] else "product"


def _candidates(shape: Shape, rows: int) -> list[str]:
    """The names of the ways that make sense, the one that needs no proof first."""
    _, outputs, _ = shape
    names = ["product"]
    if rows <= plain_products.FEW_ROWS_MAX:
        names.append("kernel")
    if backend.on_hopper() and outputs % plain_products.OUTPUTS == 0:
        names.append("wide kernel")
    return names


def _all_alike(got: list[mx.array], wanted: list[mx.array]) -> bool:
    return all(map(same_but_for_rounding, got, wanted))


def _turn(layer: Any) -> None:
    layer["_turned"] = layer["weight"].T
    mx.eval(layer["_turned"])
