"""Encoders on a CPU: attention and activations with an exp that compilers vectorise, and weights that lie as read.

On Linux MLX computes exp, erf and tanh number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_unflatten

from zmqengine.engine.embedding.cpu_math import exp_minus, gelu, gelu_tanh, silu
from zmqengine.engine.models import arrays

SCORES_MIN = 16_384
"""Fewer scores take MLX less time than the calls of the own softmax: it computes about 50 of them in a microsecond."""
_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "swiglu": silu,
}


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention` of arrays (texts, heads, tokens, head width)."""
    texts, heads, rows, _ = queries.shape
    # One head of keys or as many as of queries: products broadcast them.
    if texts * heads * rows * keys.shape[2] < SCORES_MIN or keys.shape[1] not in (1, heads):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    # Products copy arrays whose heads lie apart, one number at a time.
    scores = (queries * scale) @ mx.contiguous(keys).swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    weights = exp_minus(scores.max(axis=-1, keepdims=True) - scores)
    return (weights @ mx.contiguous(values)) / weights.sum(axis=-1, keepdims=True)


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """The activation that transformers calls by this name. Raises `ModelLoadError` for one that is not known."""
    return _ACTIVATIONS.get(name) or arrays.activation(name)


class TurnedLinear(Module):
    """A linear layer whose `weight` lies (inputs, outputs) in memory.

    OpenBLAS multiplies few tokens up to 2.4 times as fast then.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.contiguous(linear.weight.T)
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, states: mx.array) -> mx.array:
        if "bias" in self:
            return mx.addmm(self.bias, states, self.weight)
        return states @ self.weight


def store(encoder: Any) -> None:
    """Store the weights of an encoder, which has them by now, in float32 and as products read them."""
    encoder.set_dtype(mx.float32)
    linear = [
        (name, TurnedLinear(module)) for name, module in encoder.named_modules() if type(module) is Linear
    ]
    encoder.update_modules(tree_unflatten(linear))
