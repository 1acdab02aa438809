"""A checkpoint's arrays under the names of our modules, and activations by the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, gelu_fast_approx, relu, silu

from zmqengine.errors import ModelLoadError

Weights = dict[str, mx.array]

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "gelu_fast": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "quick_gelu": gelu_fast_approx,
    "relu": relu,
    "silu": silu,
    "swiglu": silu,
    "tanh": mx.tanh,
}


def read_arrays(directory: Path) -> dict[str, mx.array]:
    """Every array of the safetensors files of a directory. Raises `ModelLoadError` if there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{directory} has no .safetensors file: convert the model's weights to safetensors"
        )
    arrays: dict[str, mx.array] = {}
    for file in files:
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        arrays |= loaded
    return arrays


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """The activation that transformers calls by this name. Raises `ModelLoadError` for one that is not known."""
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"the activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def renamed(
    weights: Mapping[str, mx.array], prefixes: Iterable[str], rules: Iterable[tuple[str, str]]
) -> Weights:
    """Arrays without the first of `prefixes` that their name begins with, then under the names that `rules` give.

    A rule is a regular expression for the whole name and its replacement. Names that no rule knows are left out:
    heads of other tasks, and tables that are computed.
    """
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    found: Weights = {}
    for name, array in weights.items():
        plain = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
        # Checkpoints that were converted from TensorFlow.
        plain = plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )
        for pattern, replacement in compiled:
            if pattern.fullmatch(plain):
                found[pattern.sub(replacement, plain)] = array
                break
    return found


def joined(weights: Weights, names: tuple[str, ...], into: str) -> Weights:
    """Queries, keys and values of a layer as one array: one product instead of three.

    `names` are the last parts of the arrays' names but one, such as `query`.
    """
    kept = dict(weights)
    for name in [name for name in weights if f".{names[0]}." in name]:
        parts = [kept.pop(name.replace(f".{names[0]}.", f".{part}.")) for part in names]
        kept[name.replace(f".{names[0]}.", f".{into}.")] = mx.concatenate(parts, axis=0)
    return kept


def whole(value: Any, name: str) -> int:
    """A whole number of a config. Raises `ModelLoadError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {name} is {value!r}")
    return value
