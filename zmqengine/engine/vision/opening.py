"""From a checkpoint that sees to its eye."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zmqengine.checkpoint.vision import VisionRecipe
from zmqengine.engine.vision.eye import Embed, Eye
from zmqengine.engine.vision.tower import Tower
from zmqengine.engine.vision.towers.muse_spark import MuseSparkTower
from zmqengine.engine.vision.towers.opening import open_tower
from zmqengine.errors import ModelLoadError


def open_eye(directory: Path, recipe: VisionRecipe, network: Any, model: Any, *, on_gpu: bool) -> Eye:
    """The eye of a checkpoint: its tower, and the embeddings of `model`, which runs the text of mlx-lm's `network`.

    Raises `ModelLoadError`.
    """
    if recipe.family == "muse_spark":
        muse = MuseSparkTower(network, recipe.mean, recipe.std)
        return Eye(recipe.card, muse, muse.embed)
    tower: Tower = open_tower(directory, recipe, on_gpu=on_gpu)
    return Eye(recipe.card, tower, _embed_of(model))


def _embed_of(model: Any) -> Embed:
    """The embeddings of our decoder, or of a text model of mlx-lm, which may be a part of another."""
    if hasattr(model, "embed"):
        own: Embed = model.embed
        return own
    for owner in (model, getattr(model, "language_model", None)):
        inner = getattr(owner, "model", None)
        if inner is not None and hasattr(inner, "embed_tokens"):
            found: Embed = inner.embed_tokens
            return found
    raise ModelLoadError(f"no embeddings of tokens were found in {type(model).__module__}")
