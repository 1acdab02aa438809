"""A linear layer whose weights are turned once, and not in each call."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear


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
