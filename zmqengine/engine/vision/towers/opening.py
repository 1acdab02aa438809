"""From a checkpoint to its tower."""

from __future__ import annotations

import importlib
from pathlib import Path

from zmqengine.checkpoint.vision import VisionRecipe
from zmqengine.engine.vision.towers.layered import LayeredTower, Normalisation
from zmqengine.engine.vision.towers.parts import bytes_of, fill, tower_arrays
from zmqengine.errors import ModelLoadError

_ENCODERS = {"pixtral": "Pixtral", "siglip": "Siglip", "internvit": "InternVit", "qwen": "QwenVision"}


def open_tower(directory: Path, recipe: VisionRecipe, *, on_gpu: bool) -> LayeredTower:
    """The tower of a checkpoint, its arrays evaluated on this thread. Raises `ModelLoadError`."""
    family = importlib.import_module(f"zmqengine.engine.vision.towers.{recipe.family}")
    try:
        encoder = getattr(family, _ENCODERS[recipe.family])(recipe.config)
        arrays = family.arrays(tower_arrays(directory, family.PREFIXES, family.RULES), recipe.config)
    except KeyError as error:
        raise ModelLoadError(f"{directory}: the vision tower lacks {error}") from error
    dtype = fill(encoder, arrays, directory, recipe.config, on_gpu=on_gpu)
    return LayeredTower(encoder, Normalisation(recipe.mean, recipe.std), dtype, bytes_of(encoder))
