"""The fastest variant of each product of a decoder, by the number of rows.

MLX reads quantised weights again for every row of a batch, on CUDA entirely and on a CPU almost. Dequantised weights go
through cuBLAS on CUDA, which takes the host twice the time of a kernel launch. So the variants that `Ops` offers are
timed at the start, for each shape of a product and number of rows.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import Any

import mlx.core as mx

from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.autotune.variants import GAIN_MIN, fastest, in_words, same_but_for_rounding
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.layers import Linear
from zmqengine.engine.models.ops import Ops, Product, shape_of
from zmqengine.engine.models.tree import arrays_of, filled, parts_of

log = logging.getLogger("zmqengine.engine")

# Products of one shape that are timed in turns, so that weights do not come from the device's cache.
_LINEARS_TIMED = 4
_CALLS_EACH = 4
# Bound on outputs in memory: those of two variants at once.
_OUTPUTS_BYTES_MAX = 128 << 20
# The gain of dequantised weights grows with the rows: from this factor on, larger numbers are not measured.
_FAR_AHEAD = 2.0


def tune_products(
    weights: DecoderWeights,
    ops: Ops,
    saved: SavedChoices,
    *,
    rows_max: int,
    until_s: float,
    report: Callable[[float], None] = lambda fraction: None,
) -> str:
    """Set the fastest variant of each product in `ops`; returns the choices in words.

    Nothing is measured after `until_s`, on the clock of `time.perf_counter`.
    """
    shapes: dict[object, list[Linear]] = defaultdict(list)
    for linear in _linears(weights):
        shapes[shape_of(linear)].append(linear)
    chosen: dict[str, str] = {}
    for index, linears in enumerate(shapes.values()):
        rows = _rows(ops, linears[0], rows_max)
        if not rows:
            continue
        names = _choose(ops, linears[:_LINEARS_TIMED], rows, saved.choices, until_s)
        ops.choose(linears[0], names)
        chosen |= {name_of(linears[0], count): name for count, name in names.items()}
        report((index + 1) / len(shapes))
    saved.keep(chosen)
    return in_words(chosen)


def name_of(linear: Linear, rows: int) -> str:
    """The shape of a product and the number of rows, in words."""
    packing = f"{linear.bits} bits of {linear.mode} by {linear.group_size}, " if linear.bits else ""
    dtype = str(linear.dtype).split(".")[-1]
    return f"{linear.inputs}x{linear.outputs}, {packing}{dtype}, {rows} rows"


def _linears(weights: DecoderWeights) -> list[Linear]:
    """Every product except those of experts, which are gathered."""
    return [linear for linear in parts_of((weights.head, weights.layers), Linear) if linear.weight.ndim == 2]


def _rows(ops: Ops, linear: Linear, rows_max: int) -> list[int]:
    """Numbers of rows to measure: up to `rows_max` in a step, and the largest for prompts."""
    rows = list(ops.measured_rows(linear))
    return [count for count in rows if not linear.bits or count <= max(rows_max, 1) or count == rows[-1]]


def _choose(
    ops: Ops, linears: list[Linear], rows: list[int], known: dict[str, str], until_s: float
) -> dict[int, str]:
    """The chosen variants, by number of rows."""
    first = linears[0]
    names: dict[int, str] = {}
    if not first.bits:
        names[1] = ops.unmeasured(first, 1)
    settled = ""
    for count in rows:
        variants = ops.variants(first, count)
        name = settled or known.get(name_of(first, count), "")
        if name not in variants:
            if len(variants) == 1 or time.perf_counter() > until_s:
                name = ops.unmeasured(first, count)
            else:
                name, is_far_ahead = _measure(ops, linears, count, variants)
                settled = name if name == "dequantised" and is_far_ahead and "kernel" not in variants else ""
        names[count] = name
    if not first.bits:
        names[rows[-1] + 1] = ops.unmeasured(first, rows[-1] + 1)
    return names


def _measure(ops: Ops, linears: list[Linear], rows: int, variants: Any) -> tuple[str, bool]:
    """The fastest variant, and whether it leads by the factor that ends the measurement."""
    first = linears[0]
    # Products with quantised weights take long enough to be timed one by one.
    outputs_bytes = rows * first.outputs * first.dtype.size * len(linears)
    turns = 1 if first.bits else max(1, min(_CALLS_EACH, _OUTPUTS_BYTES_MAX // outputs_bytes))
    inputs = [mx.random.normal((rows, first.inputs)).astype(first.dtype) for _ in linears] * turns
    mx.eval(inputs)

    def one_by_one(variant: Product) -> Callable[[], Any]:
        # Every variant begins with the same weights, so that results can be compared.
        indices = cycle(range(len(linears)))

        def call() -> list[mx.array]:
            at = next(indices)
            return [variant(inputs[at], linears[at])]

        return call

    def together(variant: Product) -> Callable[[], Any]:
        # As in a step, Python's work for a call is done once. Weights are arguments, or they would be constants.
        def multiply(arrays: list[mx.array], weights: list[list[mx.array]]) -> list[mx.array]:
            found = []
            for index, array in enumerate(arrays):
                at = index % len(linears)
                found.append(variant(array, filled(linears[at], iter(weights[at]))))
            return found

        traced = mx.compile(multiply)
        return lambda: traced(inputs, list(map(arrays_of, linears)))

    calls = one_by_one if first.bits else together
    loss_max = ops.loss_max(first, rows)
    timing = fastest(
        {name: calls(variant) for name, variant in variants.items()},
        calls=8 if first.bits else 1,
        agree=_all_alike,
        gain_min=GAIN_MIN if loss_max == 1.0 else 1 / loss_max,
    )
    log.debug("product", extra={"shape": name_of(first, rows), **timing.microseconds})
    others = [us for name, us in timing.microseconds.items() if name != timing.best]
    return timing.best, min(others, default=0.0) > _FAR_AHEAD * timing.microseconds[timing.best]


def _all_alike(got: list[mx.array], wanted: list[mx.array]) -> bool:
    return all(map(same_but_for_rounding, got, wanted))
