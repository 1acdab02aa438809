"""Reads the tensors of a head that drafts out of a checkpoint: mlx-lm drops them when it loads a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.checkpoint.head_files import head_beginning, head_files, head_name, missing_head
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.engine.models.mlx_lm import load_config

log = logging.getLogger("zmqengine.engine")


def read_head_tensors(directory: Path) -> Mapping[str, mx.array] | None:
    """The tensors of a model's head by their names within it, not read yet; None without one, which is logged where
    the config promises one."""
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
        return arrays or None
    except CheckpointError as error:
        log.warning("the model's own head does not draft", extra={"reason": str(error)})
        return None
