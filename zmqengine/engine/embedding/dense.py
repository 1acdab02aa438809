"""Products that sentence-transformers puts after the pooling, and the reading of arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.arrays import read_arrays
from zmqengine.errors import ModelLoadError


class Dense:
    """A product with a bias and perhaps a tanh, in float32."""

    def __init__(self, weight: mx.array, bias: mx.array | None, activate: bool) -> None:
        self._weight = weight.astype(mx.float32)
        self._bias = None if bias is None else bias.astype(mx.float32)
        self._activate = activate
        self.width = weight.shape[0]

    def __call__(self, pooled: mx.array) -> mx.array:
        made = pooled @ self._weight.T
        if self._bias is not None:
            made = made + self._bias
        return mx.tanh(made) if self._activate else made


def load_dense(directory: Path) -> Dense:
    """The product in a directory of sentence-transformers. Raises `ModelLoadError`."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{directory}/config.json cannot be read: {error}") from error
    arrays = read_arrays(directory)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ("Tanh", "Identity"):
        raise ModelLoadError(f"{directory}: the activation {name} is neither Tanh nor Identity")
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), name == "Tanh")
