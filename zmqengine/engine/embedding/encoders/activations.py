"""Activations of encoders. MLX computes erf, tanh and exp number by number on Linux CPUs, which takes longer than the
products around them; there they are rational functions, of which it computes many numbers at once.

Coefficients for float32 from Eigen (`Core/MathFunctionsImpl.h`, `generic_fast_tanh_float`, and its erf of 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.models import arrays

# One pass over the numbers, as MLX's own activations are.
fused = partial(mx.compile, shapeless=True)


class Rational(NamedTuple):
    """An odd function: x P(x^2) / Q(x^2), constant beyond `bound`. Coefficients begin with the highest power."""

    above: Sequence[float]
    below: Sequence[float]
    bound: float

    def __call__(self, x: mx.array) -> mx.array:
        x = mx.clip(x, -self.bound, self.bound)
        square = x * x
        return x * _polynomial(self.above, square) / _polynomial(self.below, square)


ERF = Rational(
    (
        -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
        -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
    ),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
    4.0,
)  # fmt: skip
TANH = Rational(
    (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
    ),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
    7.90531110763549805,
)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: mx.array) -> mx.array:
    made = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        made = made * x + coefficient
    return made


@fused
def _gelu(x: mx.array) -> mx.array:
    return x * (0.5 + 0.5 * ERF(x * math.sqrt(0.5)))


@fused
def _gelu_tanh(x: mx.array) -> mx.array:
    return x * (0.5 + 0.5 * TANH(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@fused
def _silu(x: mx.array) -> mx.array:
    return x * (0.5 + 0.5 * TANH(0.5 * x))


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
