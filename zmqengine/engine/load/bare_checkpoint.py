"""Checkpoints without a language model's prefix in array names, such as Qwen3-Embedding's: mlx-lm expects the
prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.mlx_lm import model_classes

TRUNK = "model."


def is_bare(directory: Path) -> bool:
    """Whether no array name in the checkpoint has the prefix."""
    if not (directory / "modules.json").is_file():
        return False
    files = sorted(directory.glob("model*.safetensors"))
    names = [str(name) for file in files for name in mx.load(str(file))]
    return bool(names) and not any(name.startswith(TRUNK) for name in names)


def bare_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """mlx-lm's classes for this model, with the prefix added to the names that they read."""
    model_class, arguments_class = model_classes(config)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {f"{TRUNK}{name}": array for name, array in weights.items()}
        whole: dict[str, mx.array] = (
            model_class.sanitize(self, named) if hasattr(model_class, "sanitize") else named
        )
        return whole

    members = {"sanitize": sanitize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members), arguments_class
