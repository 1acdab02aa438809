"""Sizes and types of a checkpoint's tensors, from the headers of its safetensors files.

The format: the length of the header, 8 bytes little-endian; the header in JSON, a map of tensor names to
`dtype`, `shape` and `data_offsets`; the data. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors library."""
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class CheckpointError(Exception):
    """A missing, damaged or foreign file of a checkpoint."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Weights:
    """Totals over the tensors of a checkpoint. `float_bytes` is the size of one activation."""

    total_bytes: int
    tensors: int
    float_bytes: int


def read_weights(directory: Path) -> Weights:
    """Totals over every `model*.safetensors` in the directory, and the head beside them. Reads headers only. Raises
    `CheckpointError`."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no model*.safetensors: it is not a model in mlx-lm's format")
    total, kinds = 0, Counter[str]()
    for file in [*files, *directory.glob("mtp.safetensors")]:
        for tensor in _read_header(file).values():
            total += tensor.data_offsets[1] - tensor.data_offsets[0]
            kinds[tensor.dtype] += 1
    # Quantised weights are integers; the compute type is that of the scales and norms beside them.
    floats = [(count, kind) for kind, count in kinds.items() if kind in FLOAT_BYTES]
    return Weights(total, kinds.total(), FLOAT_BYTES[max(floats)[1]] if floats else 2)


def tensor_names(directory: Path) -> set[str]:
    """Names of the tensors in every `model*.safetensors` of the directory. Raises `CheckpointError`."""
    return {name for file in directory.glob("model*.safetensors") for name in _read_header(file)}


class StoredTensor(NamedTuple):
    """The shape of a tensor, and the file that has it."""

    file: Path
    shape: list[int]


def tensors_of(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the model's shards and of `mtp.safetensors` beside them. Raises `CheckpointError`."""
    files = [*directory.glob("model*.safetensors"), *directory.glob("mtp.safetensors")]
    return {
        name: StoredTensor(file, each.shape) for file in files for name, each in _read_header(file).items()
    }


def tensor_sizes(file: Path) -> dict[str, int]:
    """How many numbers each tensor of a file has. Raises `CheckpointError`."""
    return {name: math.prod(each.shape) for name, each in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, _Tensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise CheckpointError(f"{file} is not a safetensors file, or it is damaged: fetch it again")
            header = opened.read(length)
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in parts.items()}
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    ends = [8 + length + tensor.data_offsets[1] for tensor in tensors.values()]
    if max(ends, default=0) > file.stat().st_size:
        raise CheckpointError(f"{file} is cut off: fetch it again")
    return tensors
