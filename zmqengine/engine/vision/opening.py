"""From a checkpoint that sees to its eye."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from zmqengine.checkpoint.vision import VisionRecipe
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.mlx_lm_runner import MlxLmRunner
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.models.positions import CallPositions, axes_of
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.vision.eye import Embed, Eye
from zmqengine.engine.vision.tower import Tower
from zmqengine.engine.vision.towers.muse_spark import MuseSparkTower
from zmqengine.engine.vision.towers.opening import open_tower
from zmqengine.errors import ModelLoadError

log = logging.getLogger("zmqengine.engine")


def open_eye(
    directory: Path, recipe: VisionRecipe, network: Any, runner: ModelRunner, *, on_gpu: bool
) -> Eye | None:
    """The eye of a checkpoint: its tower, and the embeddings of the text of mlx-lm's `network` that `runner` runs.

    None where nothing that is opened here can read its features. Raises `ModelLoadError`.
    """
    if recipe.family == "muse_spark":
        muse = MuseSparkTower(network, recipe.mean, recipe.std)
        return Eye(recipe.card, muse, muse.embed)
    tower: Tower = open_tower(directory, recipe, on_gpu=on_gpu)
    if not recipe.has_three_positions:
        return Eye(recipe.card, tower, _embed_of(runner))
    text = recipe.config.get("text_config") or recipe.config
    axes = axes_of(text, is_interleaved=recipe.config["model_type"] not in ("qwen2_vl", "qwen2_5_vl"))
    if axes is None:
        log.warning("the model sees nothing: its config has no mrope_section")
        return None
    if isinstance(runner, SlotRunner):
        runner.decoder.axes = axes
    else:
        assert isinstance(runner, MlxLmRunner)
        try:
            runner.model.places = CallPositions(runner.model.layers, axes)
        except Unsupported as error:
            log.warning(
                "the model sees nothing: three positions cannot be given to mlx-lm's code",
                extra={"reason": str(error)},
            )
            return None
    return Eye(recipe.card, tower, _embed_of(runner), recipe.card.merge)


def _embed_of(runner: ModelRunner) -> Embed:
    """The embeddings of our decoder, or of a text model of mlx-lm, which may be a part of another."""
    if isinstance(runner, SlotRunner):
        return runner.decoder.embed
    assert isinstance(runner, MlxLmRunner)
    for owner in (runner.model, getattr(runner.model, "language_model", None)):
        inner = getattr(owner, "model", None)
        if inner is not None and hasattr(inner, "embed_tokens"):
            embed: Embed = inner.embed_tokens
            return embed
    raise ModelLoadError(f"no embeddings of tokens were found in {type(runner.model).__module__}")
