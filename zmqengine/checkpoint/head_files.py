"""Heads by which a model drafts for itself, in the files of a checkpoint: no arrays are read here.

Configs do not tell: most conversions for MLX keep the promise and drop the tensors, and some have tensors without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zmqengine.checkpoint.weights import tensors_of

HEAD_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Types of models whose heads are read."""
_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_NAMES = "mtp."


def head_name(name: str) -> str | None:
    """The name of a tensor within its head; None for one of the rest of the model."""
    before, mark, within = name.partition(_NAMES)
    return within if mark and (not before or before.endswith(".")) else None


def head_files(directory: Path) -> list[Path]:
    """The files that have tensors of a head, in the model's shards or beside them. Raises `CheckpointError`."""
    return sorted({each.file for name, each in tensors_of(directory).items() if head_name(name) is not None})


def is_raw(directory: Path) -> bool:
    """Whether the weights are as they were published: convolutions in torch's layout, norms with 1 left out."""
    return any(
        "conv1d.weight" in name and each.shape[-1] != 1 for name, each in tensors_of(directory).items()
    )


def missing_head(directory: Path, config: Mapping[str, Any]) -> str:
    """One line about a model whose config promises a head that its files lack; empty for any other."""
    text = config.get("text_config")
    told = {**(text if isinstance(text, dict) else {}), **config}
    promise = next((name for name in _PROMISES if told.get(name)), None)
    if config.get("model_type") not in HEAD_TYPES or promise is None or head_files(directory):
        return ""
    return f"its config has {promise}, and its files have no such head: the conversion dropped it"
