"""The files of a LoRA adapter, read by any thread: MLX is not needed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zmqengine.checkpoint.adapters import PEFT, adapter_file
from zmqengine.errors import ModelLoadError

_UNREAD = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "fan_in_fan_out": False,
}  # fmt: skip
"""Options of PEFT that change what is computed, and their values that do not."""


class AdapterFiles(NamedTuple):
    """An adapter to be known as `name`: its arrays as a safetensors file, and their scale. `digest`: that of both."""

    name: str
    digest: str
    arrays: bytes
    scale: float
    is_peft: bool


def read_files(name: str, directory: Path) -> AdapterFiles:
    """Read the adapter in a directory. Raises `ModelLoadError`."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text("utf-8"))
        file = adapter_file(directory)
        is_peft = file.name == PEFT
        scale = _scale_of_peft(config) if is_peft else _scale_of_mlx_lm(config)
        arrays = file.read_bytes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(name, error) from error
    digest = hashlib.blake2b(arrays + repr(scale).encode(), digest_size=8).hexdigest()
    return AdapterFiles(name, digest, arrays, scale, is_peft)


def unreadable(name: str, error: Exception) -> ModelLoadError:
    """The refusal of an adapter whose files are damaged or of another kind."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return ModelLoadError(f"the adapter {name} cannot be read: {reason}")


def _scale_of_mlx_lm(config: Mapping[str, Any]) -> float:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ValueError(f"it is of the kind {kind!r}, not lora")
    return float(config["lora_parameters"]["scale"])


def _scale_of_peft(config: Mapping[str, Any]) -> float:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"it is of the kind {config.get('peft_type')!r}, not LORA")
    for name, neutral in _UNREAD.items():
        if config.get(name) not in (neutral, None):
            raise ValueError(f"{name} is {config[name]!r}, which is not supported")
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
