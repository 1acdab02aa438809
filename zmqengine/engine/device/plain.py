"""Products with weights in full width, by the faster of two ways for the number of rows.

On CUDA MLX has a kernel for one row and takes cuBLAS for several, which costs the host twice the time of starting a
kernel: 129 products a step of an 8B model. For up to 40 rows a kernel of ours reads the weights once, as fast as memory
gives them. For each shape of a layer and number of rows both are timed at the start.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from zmqengine.engine.device.ways import Product, Way, WayTable, fastest, same_but_for_rounding
from zmqengine.engine.kernels.kernel_text import kernel_text

ROWS = (8, 16, 32, 40)
"""Numbers of rows that are measured; others take what was best for the next larger one, and more than these cuBLAS."""

_TILES = (1, 2, 4, 5)
_WARPS = 4
_PART = 64
# A kernel that is slower by no more than this is worth it, as the host starts it in half the time.
_LOSS_MAX = 1.05
# Layers of a shape that are used in turn, as their weights must not come out of a cache.
_LAYERS_TIMED = 4
_CALLS_EACH = 4

Shape = tuple[int, int, str]


class TurnedLinear(Linear):
    """A layer that keeps a view of its weights as its product needs them, instead of making one in every step."""

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output."""
        return turned(x, self)


class FewRowsLinear(TurnedLinear):
    """Such a layer that goes by a table."""

    table: WayTable

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output."""
        return self.table.multiply(x, self)


class FewRowsEmbedding(Embedding):
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
    """A kernel for CUDA that reads the weights once for up to 40 rows, and multiplies with tensor cores."""
    weights = layer["weight"]
    if inputs.dtype != weights.dtype:
        return turned(inputs, layer)
    outputs, dim = weights.shape
    flat = inputs.reshape(-1, dim)
    rows = flat.shape[0]
    cut = Cut.of(rows, outputs)
    done = _kernel(cut.shared_bytes)(
        inputs=[flat, weights],
        template=[
            ("T", inputs.dtype),
            ("TILES", cut.tiles),
            ("COLUMNS", cut.columns),
            ("STAGES", cut.stages),
            ("WARPS", _WARPS),
        ],
        grid=(-(-outputs // cut.columns) * _WARPS * 32, 1, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[inputs.dtype],
    )
    found: mx.array = done[0].reshape(*inputs.shape[:-1], outputs)
    return found + layer["bias"] if "bias" in layer else found


WAYS: dict[str, Product] = {"product": turned, "kernel": few_rows}


class Cut(NamedTuple):
    """How a product is cut for the kernel: `tiles` of 8 rows, and `columns` a block, whose warps copy `stages` parts
    ahead."""

    tiles: int
    columns: int
    stages: int

    @classmethod
    def of(cls, rows: int, outputs: int) -> Cut:
        """The fastest one on an H200, where blocks of all columns are to find room at once on 132 multiprocessors."""
        tiles = next(tiles for tiles in _TILES if rows <= 8 * tiles)
        if outputs <= (4_224 if tiles >= 4 else 8_448):
            return cls(tiles, 16, 3 if tiles > 4 else 4)
        if outputs <= 8_448 or tiles < 4:
            return cls(tiles, 32, 3)
        return cls(tiles, 64, 2)

    @property
    def shared_bytes(self) -> int:
        """What a block needs of shared memory: so much that two find room on an H200. Up to 32 rows every device of
        compute capability 8 or more has it, 99 KiB."""
        return _WARPS * self.stages * (self.columns + 8 * self.tiles) * _PART * 2


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
            if best not in WAYS and time.perf_counter() < until_s:
                best = _best(layers, rows)
            if best in WAYS:
                names[rows] = chosen[name] = best
        table = WayTable({**names, max(names) + 1: "product"}, WAYS)
        for layer in layers:
            layer.__class__ = FewRowsEmbedding if isinstance(layer, Embedding) else FewRowsLinear
            layer.table = table
        report((place + 1) / len(shapes))
    return chosen


def restore(model: Module) -> None:
    """Undo `measure`."""
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in (FewRowsLinear, FewRowsEmbedding):
            module.__class__ = Embedding if isinstance(module, Embedding) else Linear
            del module["_turned"]


def layers_by_shape(model: Module) -> dict[Shape, list[Any]]:
    """The layers of `model` that the kernel can multiply."""
    found: dict[Shape, list[Any]] = defaultdict(list)
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in (Linear, TurnedLinear, FewRowsLinear, Embedding, FewRowsEmbedding):
            weights: Any = module["weight"]
            outputs, inputs = weights.shape
            if weights.dtype in (mx.bfloat16, mx.float16) and inputs % _PART == 0:
                found[inputs, outputs, str(weights.dtype).split(".")[-1]].append(module)
    return dict(found)


def name_of(shape: Shape, rows: int) -> str:
    """The shape and the number of rows, in words."""
    inputs, outputs, dtype = shape
    return f"{inputs}x{outputs}, {dtype}, {rows} rows"


def _best(layers: list[Any], rows: int) -> str:
    some = layers[:_LAYERS_TIMED]
    weights = some[0]["weight"]
    inputs = [mx.random.normal((rows, 1, weights.shape[1])).astype(weights.dtype) for _ in some] * _CALLS_EACH
    mx.eval(inputs)

    def calls(way: Product) -> Way:
        # As in a step: what Python does for a call is done once.
        traced = mx.compile(
            lambda *given: [way(one, some[place % len(some)]) for place, one in enumerate(given)]
        )
        return lambda: traced(*inputs)

    found = fastest({name: calls(way) for name, way in WAYS.items()}, calls=1, agree=_all_alike).microseconds
    return "kernel" if found.get("kernel", float("inf")) <= _LOSS_MAX * found["product"] else "product"


def _all_alike(got: list[mx.array], wanted: list[mx.array]) -> bool:
    return all(map(same_but_for_rounding, got, wanted))


def _turn(layer: Any) -> None:
    layer["_turned"] = layer["weight"].T
    mx.eval(layer["_turned"])


@cache
def _kernel(shared_bytes: int) -> Any:
    return mx.fast.cuda_kernel(
        name="plain_product",
        input_names=["x", "w"],
        output_names=["out"],
        source=kernel_text("plain_product.cu"),
        header=kernel_text("tensor_cores.cuh", "plain_product.cuh"),
        shared_memory=shared_bytes,
    )
