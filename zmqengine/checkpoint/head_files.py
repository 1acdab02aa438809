"""Heads by which a model drafts for itself, in the files of a checkpoint: no arrays are read here.

Configs do not tell: most conversions for MLX keep the promise and drop the tensors, and some have tensors without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zmqengine.checkpoint.weights import tensors_of

_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
# How the names of a head's tensors begin, by the type of models whose heads are read.
_BEGINNINGS = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), "mtp."),
    # One layer more than the config counts.
    "glm4_moe": "model.layers.{num_hidden_layers}.",
    # Of several heads, each for one token, the first.
    "mimo": "model.mtp_layers.0.",
}


def head_beginning(config: Mapping[str, Any]) -> str | None:
    """How the names of the tensors of a model's head begin; None for a type of models whose heads are not read."""
    beginning = _BEGINNINGS.get(str(config.get("model_type")))
    return None if beginning is None else beginning.format_map(_Told(config))


def head_name(name: str, beginning: str) -> str | None:
    """The name of a tensor within its head; None for one of the rest of the model."""
    before, mark, within = name.partition(beginning)
    return within if mark and (not before or before.endswith(".")) else None


def head_files(directory: Path, beginning: str) -> list[Path]:
    """The files that have tensors of a head, in the model's shards or beside them. Raises `CheckpointError`."""
    tensors = tensors_of(directory).items()
    return sorted({each.file for name, each in tensors if head_name(name, beginning) is not None})


def missing_head(directory: Path, config: Mapping[str, Any]) -> str:
    """One line about a model whose config promises a head that its files lack; empty for any other."""
    text = config.get("text_config")
    told = {**(text if isinstance(text, dict) else {}), **config}
    promise = next((name for name in _PROMISES if told.get(name)), None)
    beginning = head_beginning(config)
    if beginning is None or promise is None or head_files(directory, beginning):
        return ""
    return f"its config has {promise}, and its files have no such head: the conversion dropped it"


class _Told(dict[str, Any]):
    """A config in which a missing number is no error: no tensor has such a name."""

    def __missing__(self, key: str) -> str:
        return "?"
