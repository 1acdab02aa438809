"""Activations of encoders: MLX's, and on CPUs faster ones."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.models import arrays
from zmqengine.engine.models.cpu_math import gelu, gelu_tanh, silu

_BY_NAME: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "swiglu": silu,
}


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """The activation that transformers calls by this name. Raises `ModelLoadError` for one that is not known."""
    known = arrays.activation(name)
    return known if on_gpu() else _BY_NAME.get(name, known)
