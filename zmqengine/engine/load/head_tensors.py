"""Reads the tensors of a head that drafts out of a checkpoint: mlx-lm drops them when it loads a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.checkpoint.head_files import HEAD_TYPES, head_files, head_name, is_raw, missing_head
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.engine.models.mlx_lm import load_config

log = logging.getLogger("zmqengine.engine")


class HeadTensors(NamedTuple):
    """The tensors of a head by their names within it, not read yet. `is_raw`: as they were published."""

    arrays: Mapping[str, mx.array]
    is_raw: bool


def read_head_tensors(directory: Path) -> HeadTensors | None:
    """The tensors of a model's head; None without one, which is logged where the config promises one."""
    config = load_config(directory)
    if config.get("model_type") not in HEAD_TYPES:
        return None
    try:
        if missing := missing_head(directory, config):
            log.warning("the model has no head that drafts", extra={"reason": missing})
        arrays: dict[str, mx.array] = {}
        for file in head_files(directory):
            stored: Any = mx.load(str(file))
            arrays |= {
                within: array for name, array in stored.items() if (within := head_name(name)) is not None
            }
        return HeadTensors(arrays, is_raw(directory)) if arrays else None
    except CheckpointError as error:
        log.warning("the model's own head does not draft", extra={"reason": str(error)})
        return None
