"""LoRA adapters as files: those of mlx-lm (adapters.safetensors) and of PEFT (adapter_model.safetensors)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.errors import ModelLoadError

_MLX_LM, _PEFT = "adapters.safetensors", "adapter_model.safetensors"
_PART = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<module>[\w.]+)\.lora_(?P<side>[aAbB])(?:\.default)?(?:\.weight)?"
)
_UNREAD = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "fan_in_fan_out": False,
}  # fmt: skip
"""Options of PEFT that change what is computed, and their values that do not."""


class Pair(NamedTuple):
    """The factors of one product: `down` [inputs, rank], and `up` [rank, outputs] with the scale in it."""

    down: mx.array
    up: mx.array


class Lora(NamedTuple):
    """An adapter: its pairs by layer and module, such as (3, "self_attn.q_proj"). `digest`: that of its files."""

    name: str
    digest: str
    pairs: Mapping[tuple[int, str], Pair]


def read_lora(name: str, directory: Path) -> Lora:
    """Read the adapter in a directory, to be known as `name`. Raises `ModelLoadError`."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text("utf-8"))
        is_peft = (directory / _PEFT).is_file()
        file = directory / (_PEFT if is_peft else _MLX_LM)
        scale = _scale_of_peft(config) if is_peft else _scale_of_mlx_lm(config)
        arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        digest = hashlib.blake2b(file.read_bytes() + repr(scale).encode(), digest_size=8).hexdigest()
        return Lora(name, digest, _pairs(arrays, scale, is_peft=is_peft))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelLoadError(f"the adapter {name} in {directory} cannot be read: {error}") from error


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


def _pairs(arrays: Mapping[str, mx.array], scale: float, *, is_peft: bool) -> dict[tuple[int, str], Pair]:
    sides: dict[tuple[int, str], dict[str, mx.array]] = {}
    for name, array in arrays.items():
        match = _PART.fullmatch(name)
        if match is None or array.ndim != 2:
            raise ValueError(f"it changes {name}, which is not supported")
        sides.setdefault((int(match["layer"]), match["module"]), {})[match["side"].lower()] = array
    # PEFT keeps outputs first.
    return {
        key: Pair(pair["a"].T if is_peft else pair["a"], scale * (pair["b"].T if is_peft else pair["b"]))
        for key, pair in sides.items()
    }
