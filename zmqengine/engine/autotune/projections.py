"""Products that read the same input as one product: queries, keys and values, or the two halves of a gated MLP.

A GPU reads wide matrices faster than narrow ones, and the host starts three calls a layer less. The model's own code
stays as it is: the first member of a group computes all of it, the others find their part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from zmqengine.engine.autotune.quantised import MeasuredLinear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Whole:
    """The product of a group and what its members have not taken yet."""

    def __init__(self, layer: Any, cuts: list[int]) -> None:
        self.layer = layer
        self._cuts = cuts
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []
        self._left = 0

    def part(self, place: int, inputs: mx.array) -> mx.array:
        if self._input is not inputs:
            self._input = inputs
            parts: Any = mx.split(self.layer(inputs), self._cuts, axis=-1)
            self._parts = parts
            self._left = len(self._parts)
        found = self._parts[place]
        self._left -= 1
        if not self._left:
            # Nothing is kept beyond the step.
            self._input, self._parts = None, []
        return found


class Member(Module):
    """A place in a group; the first one carries the weights of all."""

    def __init__(self, whole: _Whole, place: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole_product = whole
        self._place = place
        if not place:
            self.whole = whole.layer

    def __call__(self, inputs: mx.array) -> mx.array:
        """This member's part of the product."""
        return self._whole_product.part(self._place, inputs)


def groups(model: Module) -> list[tuple[Module, tuple[str, ...]]]:
    """The groups in `model` that can be one product, each with the module that it is in."""
    return [
        (module, names)
        for module in model.modules()  # type: ignore[no-untyped-call]
        for names in GROUPS
        if all(name in module for name in names) and _alike([module[name] for name in names])
    ]


def join(layers: Sequence[Any]) -> Any:
    """One layer that gives what `layers` give, one after the other."""
    first = layers[0]
    kind: Any = type(first)
    joined = kind.__new__(kind)
    Module.__init__(joined)  # type: ignore[no-untyped-call]
    for name in ("weight", "scales", "biases", "bias"):
        if first.get(name) is not None:
            joined[name] = mx.concatenate([layer[name] for layer in layers])
    if isinstance(first, QuantizedLinear):
        joined.group_size, joined.bits, joined.mode = first.group_size, first.bits, first.mode
    if isinstance(first, MeasuredLinear):
        joined.table = first.table
    mx.eval(joined.parameters())
    return joined


def join_groups(model: Module) -> int:
    """Make one product of every group; returns how many there are now."""
    found = groups(model)
    for module, names in found:
        layers = [module[name] for name in names]
        ends = [sum(_width(layer) for layer in layers[: place + 1]) for place in range(len(layers) - 1)]
        whole = _Whole(join(layers), ends)
        for place, name in enumerate(names):
            setattr(module, name, Member(whole, place))
        del layers
        # The weights were there twice for a moment; what is freed is given to the next group.
    mx.clear_cache()
    return len(found)


def _alike(layers: Sequence[Any]) -> bool:
    first = layers[0]
    if type(first) not in (Linear, QuantizedLinear, MeasuredLinear):
        return False
    facts = {
        (
            type(layer),
            layer.weight.shape[1],
            layer.weight.dtype,
            "bias" in layer,
            getattr(layer, "group_size", 0),
            getattr(layer, "bits", 0),
            getattr(layer, "mode", ""),
        )
        for layer in layers
    }
    return len(facts) == 1


def _width(layer: Any) -> int:
    width: int = layer.weight.shape[0]
    return width
