"""Reads the tensors of a head that drafts out of a checkpoint: mlx-lm drops them when it loads a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.checkpoint.drafters import HEAD_BEGINNING, Drafter
from zmqengine.checkpoint.head_files import head_beginning, head_files, head_name, missing_head
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.engine.models.mlx_lm import load_config
from zmqengine.errors import ModelLoadError

log = logging.getLogger("zmqengine.engine")


class HeadTensors(NamedTuple):
    """The tensors of a head by their names within it, not read yet. `drafter`: the directory of its own that has them,
    where the model has not."""

    arrays: Mapping[str, mx.array]
    drafter: Drafter | None = None


def read_head_tensors(directory: Path) -> HeadTensors | None:
    """The tensors of a model's head; None without one, which is logged where the config promises one."""
    config = load_config(directory)
    beginning = head_beginning(config)
    if beginning is None:
        return None
    try:
        if missing := missing_head(directory, config):
            log.warning("the model has no head that drafts", extra={"reason": missing})
        arrays: dict[str, mx.array] = {}
        for file in head_files(directory, beginning):
            stored: Any = mx.load(str(file))
            arrays |= {
                within: array
                for name, array in stored.items()
                if (within := head_name(name, beginning)) is not None
            }
        return HeadTensors(arrays) if arrays else None
    except CheckpointError as error:
        log.warning("the model's own head does not draft", extra={"reason": str(error)})
        return None


def read_drafter_tensors(directory: Path, drafter: Drafter) -> HeadTensors:
    """The tensors of a drafter in a directory of its own. Raises `ModelLoadError`."""
    if not drafter.reader:
        raise ModelLoadError(f"{directory} cannot draft: it is {drafter.kind}, and {drafter.problem}")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{directory} cannot draft: it has no safetensors files, the only ones that are read"
        )
    arrays: dict[str, mx.array] = {}
    for file in files:
        stored: Any = mx.load(str(file))
        arrays |= {name.removeprefix(HEAD_BEGINNING): array for name, array in stored.items()}
    return HeadTensors(arrays, drafter)
