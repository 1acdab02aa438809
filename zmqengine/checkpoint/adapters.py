"""Sizes of LoRA adapters, from the headers of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zmqengine.checkpoint.weights import CheckpointError, tensor_sizes

MLX_LM, PEFT = "adapters.safetensors", "adapter_model.safetensors"
_JOINED_MAX = 4
"""The most modules of a layer that share one product: those of a gated delta rule."""


def adapter_file(directory: Path) -> Path:
    """The file with the arrays of an adapter, PEFT's or mlx-lm's."""
    peft = directory / PEFT
    return peft if peft.is_file() else directory / MLX_LM


def adapters_bytes(adapters: Mapping[str, Path], float_bytes: int) -> int:
    """Bytes that these adapters take at most in a worker. Raises `CheckpointError` with the name of one.

    Each has as much room as the largest, and there is room for zeros. A factor of outputs spans those of all modules
    that share a product.
    """
    largest = 0
    for name, directory in adapters.items():
        try:
            sizes = tensor_sizes(adapter_file(directory))
        except CheckpointError as error:
            raise CheckpointError(f"the adapter {name}: {error}") from None
        numbers = sum(size * (_JOINED_MAX if ".lora_b" in key.lower() else 1) for key, size in sizes.items())
        largest = max(largest, numbers)
    return (len(adapters) + 1) * largest * float_bytes
