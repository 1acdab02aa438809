"""A linear layer whose weights are turned once, and not in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from zmqengine.engine.cuda import text_kernels


class Product(Module):
    """The computation of `linear`, with a `weight` (inputs, outputs). With `copy` the weights lie so in memory."""

    def __init__(self, linear: Linear, *, copy: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.contiguous(linear.weight.T) if copy else linear.weight.T
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, states: mx.array) -> mx.array:
        if _in_a_kernel(self, states):
            return text_kernels.multiply(states, self.weight, self.get("bias"))
        if "bias" in self:
            return mx.addmm(self.bias, states, self.weight)
        return states @ self.weight


def added(states: mx.array, layer: Module, given: mx.array) -> mx.array:
    """The sum of `states` and what a linear layer makes of `given`, in one operation where it has no bias."""
    if _in_a_kernel(layer, given):
        return text_kernels.multiply(given, layer.weight, layer.get("bias"), added=states)
    if isinstance(layer, Product) and "bias" not in layer:
        return mx.addmm(states, given, layer.weight)
    made: mx.array = states + layer(given)
    return made


def activated(layer: Module, given: mx.array, activation: Callable[[mx.array], mx.array]) -> mx.array:
    """The `activation` of what a linear layer makes of `given`."""
    if activation is gelu and _in_a_kernel(layer, given):
        return text_kernels.multiply(given, layer.weight, layer.get("bias"), gelu=True)
    return activation(layer(given))


@contextmanager
def products_in_kernels() -> Iterator[None]:
    """Within it products are our kernels for few rows on CUDA: to be traced."""
    token = _kernels.set(True)
    try:
        yield
    finally:
        _kernels.reset(token)


_kernels = ContextVar("products in kernels", default=False)


def _in_a_kernel(layer: Module, given: mx.array) -> bool:
    if not _kernels.get() or not isinstance(layer, Product):
        return False
    return given.dtype == layer.weight.dtype == mx.float32 and text_kernels.multiplies(given.shape[1])


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
