"""Activations of encoders, and exp. MLX computes erf, tanh and exp number by number on Linux CPUs, which takes longer
than the products around them; there they are made of powers of polynomials, of which it computes many at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.models import arrays

# One pass over the numbers, as MLX's own activations are.
fused = partial(mx.compile, shapeless=True)

# exp(x) is P(x)^8: P is Taylor's polynomial of exp(x / 8). For x >= 0, 1 / P(x)^8 is exp(-x) to 1e-7, besides rounding.
_EXP = [1 / math.factorial(power) / 8**power for power in range(8)]
# erfc(x) is 1 / P(x)^16 for x >= 0 to 3e-7: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.28; of
# x / sqrt(2) here.
_ERFC = [
    coefficient / math.sqrt(2) ** power
    for power, coefficient in enumerate(
        (1, 0.0705230784, 0.0422820123, 0.0092705272, 0.0001520143, 0.0002765672, 0.0000430638)
    )
]


def _polynomial(coefficients: Sequence[float], x: mx.array) -> mx.array:
    made = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        made = made * x + coefficient
    return made


def _exp(x: mx.array) -> mx.array:
    made = _polynomial(_EXP, x)
    made = made * made
    made = made * made
    return made * made


@fused
def exp_minus(x: mx.array) -> mx.array:
    """exp(-x) for x >= 0, infinity too, to 1e-6."""
    return mx.reciprocal(_exp(x))


def _sigmoid_linear(x: mx.array, inner: mx.array) -> mx.array:
    """The product x sigmoid(inner), where both have one sign."""
    return mx.maximum(x, 0) - mx.abs(x) / (1 + _exp(mx.abs(inner)))


@fused
def _gelu(x: mx.array) -> mx.array:
    size = mx.abs(x)
    power = _polynomial(_ERFC, size)
    power = power * power
    power = power * power
    power = power * power
    return mx.maximum(x, 0) - 0.5 * size / (power * power)


@fused
def _gelu_tanh(x: mx.array) -> mx.array:
    return _sigmoid_linear(x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


@fused
def _silu(x: mx.array) -> mx.array:
    return _sigmoid_linear(x, x)


_BY_NAME: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": _silu,
    "swiglu": _silu,
}


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """The activation that transformers calls by this name. Raises `ModelLoadError` for one that is not known."""
    known = arrays.activation(name)
    return known if on_gpu() else _BY_NAME.get(name, known)
