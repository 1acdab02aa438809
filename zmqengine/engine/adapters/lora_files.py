"""LoRA adapters as arrays: those of mlx-lm (adapters.safetensors) and of PEFT (adapter_model.safetensors)."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from zmqengine.engine.adapter_files import AdapterFiles, read_files, unreadable

_Key = tuple[int, str]

# Layers of a tower for images have other names before them, and are not a decoder's.
_PART = re.compile(
    r"(?:(?:base_model|model|language_model)\.)*layers\.(?P<layer>\d+)\.(?P<module>[\w.]+)"
    r"\.lora_(?P<side>[aAbB])(?:\.default)?(?:\.weight)?"
)
_EXPERT = re.compile(r"(?P<before>.*experts)\.(?P<number>\d+)\.(?P<product>\w+)")


class Pair(NamedTuple):
    """The factors of one product: `down` [inputs, rank], and `up` [rank, outputs] with the scale in it. Those of a
    mixture begin with an axis of experts."""

    down: mx.array
    up: mx.array

    @property
    def rank(self) -> int:
        """Numbers between the factors."""
        return self.down.shape[-1]


class Lora(NamedTuple):
    """An adapter: its pairs by layer and module, such as (3, "self_attn.q_proj"). `digest`: that of its files."""

    name: str
    digest: str
    pairs: Mapping[_Key, Pair]


def read_lora(name: str, directory: Path) -> Lora:
    """Read the adapter in a directory, to be known as `name`. Raises `ModelLoadError`."""
    return lora_of(read_files(name, directory))


def lora_of(files: AdapterFiles) -> Lora:
    """The arrays in the files of an adapter. Raises `ModelLoadError`."""
    try:
        arrays: dict[str, mx.array] = mx.load(io.BytesIO(files.arrays), format="safetensors")  # type: ignore[assignment]
        pairs = _with_experts_stacked(_pairs(arrays, files.scale, is_peft=files.is_peft))
    except (ValueError, KeyError, RuntimeError) as error:
        raise unreadable(files.name, error) from error
    return Lora(files.name, files.digest, pairs)


def _pairs(arrays: Mapping[str, mx.array], scale: float, *, is_peft: bool) -> dict[_Key, Pair]:
    sides: dict[_Key, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        match = _PART.fullmatch(name)
        if match is None or array.ndim not in (2, 3):
            raise ValueError(f"it changes {name}, which is not supported")
        # PEFT keeps outputs first, and so does mlx-lm for experts.
        outputs_first = is_peft or array.ndim == 3
        side = array.swapaxes(-1, -2) if outputs_first else array
        sides.setdefault((int(match["layer"]), match["module"]), {})[match["side"].lower()] = side
    for (layer, module), pair in sides.items():
        if len(pair) == 1:
            raise ValueError(f"of {module} of layer {layer} it has one factor of two")
    return {key: Pair(pair["a"], scale * pair["b"]) for key, pair in sides.items()}


def _with_experts_stacked(pairs: Mapping[_Key, Pair]) -> dict[_Key, Pair]:
    """The pairs of experts that have names of their own, as PEFT writes them, as one for all."""
    others: dict[_Key, Pair] = {}
    apart: dict[_Key, dict[int, Pair]] = {}
    for (layer, module), pair in pairs.items():
        if (match := _EXPERT.fullmatch(module)) is None:
            others[layer, module] = pair
        else:
            key = layer, f"{match['before']}.{match['product']}"
            apart.setdefault(key, {})[int(match["number"])] = pair
    for (layer, module), experts in apart.items():
        if sorted(experts) != list(range(len(experts))):
            raise ValueError(f"it changes some experts of {module} of layer {layer} and not others")
        ordered = [experts[number] for number in range(len(experts))]
        others[layer, module] = Pair(
            mx.stack([pair.down for pair in ordered]), mx.stack([pair.up for pair in ordered])
        )
    return others
