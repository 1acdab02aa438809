"""A linear layer whose weights are turned once, and not in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.models.text_ops import NormOfSums, TextKernels


class Product(Module):
    """The computation of `linear`, with a `weight` (inputs, outputs). With `copy` the weights lie so in memory."""

    def __init__(self, linear: Linear, *, copy: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.contiguous(linear.weight.T) if copy else linear.weight.T
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, states: mx.array) -> mx.array:
        if "bias" in self:
            return mx.addmm(self.bias, states, self.weight)
        return states @ self.weight


class Summed(NamedTuple):
    """States before their norm, which the kernels that read them compute."""

    sums: mx.array
    norm: NormOfSums


States = mx.array | Summed


def plain(states: States) -> mx.array:
    """`states` as an array, after the norm that they wait for."""
    if isinstance(states, Summed):
        _, weight, bias, eps = states.norm
        return mx.fast.layer_norm(states.sums, weight, bias, eps)
    return states


def multiplied(layer: Module, states: States) -> mx.array:
    """The output of a linear layer for `states`."""
    return activated(layer, states, None)


def activated(layer: Module, states: States, activation: Callable[[mx.array], mx.array] | None) -> mx.array:
    """The `activation` of the output of a linear layer for `states`."""
    sums, norm = states if isinstance(states, Summed) else (states, None)
    kernels = _kernels_of(layer, sums)
    if kernels is not None and activation in (gelu, None):
        return kernels.multiply(sums, layer.weight, layer.get("bias"), gelu=activation is gelu, norm=norm)
    made: mx.array = layer(plain(states))
    return made if activation is None else activation(made)


def added(states: mx.array, layer: Module, given: mx.array) -> mx.array:
    """The sum of `states` and what a linear layer makes of `given`, in one operation where it has no bias."""
    kernels = _kernels_of(layer, given)
    if kernels is not None:
        return kernels.multiply(given, layer.weight, layer.get("bias"), added=states)
    if isinstance(layer, Product) and "bias" not in layer:
        return mx.addmm(states, given, layer.weight)
    made: mx.array = states + layer(given)
    return made


def normed(states: States, layer: Module, given: mx.array, norm: LayerNorm) -> States:
    """The `norm` of the sum of `states` and what a linear layer makes of `given`."""
    kernels = _kernels_of(layer, given)
    if kernels is not None and kernels.sums_up(layer.weight.shape[1]):
        before, norm_before = states if isinstance(states, Summed) else (states, None)
        sums, stats = kernels.sum_up(given, layer.weight, layer.get("bias"), before, norm_before)
        return Summed(sums, NormOfSums(stats, norm.weight, norm.bias, norm.eps))
    made: mx.array = norm(added(plain(states), layer, given))
    return made


@contextmanager
def products_in_kernels(kernels: TextKernels) -> Iterator[None]:
    """Within it products of few rows are these kernels: to be traced."""
    token = _kernels.set(kernels)
    try:
        yield
    finally:
        _kernels.reset(token)


_kernels: ContextVar[TextKernels | None] = ContextVar("kernels of products", default=None)


def _kernels_of(layer: Module, given: mx.array) -> TextKernels | None:
    """The kernels of a layer's product; None where it is MLX's."""
    kernels = _kernels.get()
    if kernels is None or not isinstance(layer, Product):
        return None
    fits = given.dtype == layer.weight.dtype == mx.float32 and kernels.multiplies(given.shape[1])
    return kernels if fits else None


def fold_bias(norm: Module, adding: Module, reading: Module) -> None:
    """Move the bias of a layer that adds to the output of `norm` into that norm, so that it is added with no operation.

    `reading` is the other layer that reads the norm's output; its bias makes up for it. For float32: the sums are
    rounded.
    """
    layers = (adding, reading)
    if norm.bias.dtype != mx.float32 or not all(
        isinstance(layer, Product) and "bias" in layer for layer in layers
    ):
        return
    norm.bias = norm.bias + adding.bias
    reading.bias = reading.bias - adding.bias @ reading.weight
    del adding["bias"]
