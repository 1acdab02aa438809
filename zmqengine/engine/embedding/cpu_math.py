"""exp, and activations made of it, for CPUs: powers of polynomials.

On Linux MLX computes erf, tanh and exp of one number at a time, 15 ns each, which takes longer than the products around
them. Compilers vectorise polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

# One pass over the numbers, as MLX's own activations are.
_fused = partial(mx.compile, shapeless=True)

# exp(x) is P(x)^8: P is Taylor's polynomial of exp(x / 8). For x >= 0, 1 / P(x)^8 is exp(-x) to 1e-7, besides rounding.
_EXP = [1 / math.factorial(power) / 8**power for power in range(8)]
# Bounds of their arguments: beyond, results are negligible beside 1, and powers would overflow to NaN gradients.
_EXP_MAX, _ERFC_MAX = 88.0, 10.0
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
    made = _polynomial(_EXP, mx.minimum(x, _EXP_MAX))
    made = made * made
    made = made * made
    return made * made


@_fused
def exp_minus(x: mx.array) -> mx.array:
    """exp(-x) for x >= 0, to 1e-6; 1e-31 for infinity."""
    return mx.reciprocal(_exp(x))


def _sigmoid_linear(x: mx.array, inner: mx.array) -> mx.array:
    """The product x sigmoid(inner), where both have one sign."""
    return mx.maximum(x, 0) - mx.abs(x) / (1 + _exp(mx.abs(inner)))


@_fused
def gelu(x: mx.array) -> mx.array:
    """GELU, to 3e-7 of x."""
    size = mx.abs(x)
    power = _polynomial(_ERFC, mx.minimum(size, _ERFC_MAX))
    power = power * power
    power = power * power
    power = power * power
    return mx.maximum(x, 0) - 0.5 * size / (power * power)


@_fused
def gelu_tanh(x: mx.array) -> mx.array:
    """GELU by its approximation with tanh."""
    return _sigmoid_linear(x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


@_fused
def silu(x: mx.array) -> mx.array:
    """x sigmoid(x)."""
    return _sigmoid_linear(x, x)
