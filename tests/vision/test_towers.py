"""Features and logits equal those of transformers and torch, on a small checkpoint of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.vision import make_cases
from tests.vision.checkpoints import NAMES, case, internvl_chat, old_names, write
from tests.vision.make_cases import pixels_of
from zmqengine.checkpoint.vision import recipe_of
from zmqengine.engine.load.loader import load
from zmqengine.engine.vision.tower import WHOLE, Features, Tower
from zmqengine.engine.vision.towers import block, layered
from zmqengine.engine.vision.towers.opening import open_tower

NEAR = 2e-5
ROTATED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types with three positions for a token: their features alone are compared here."""


def tower_of(directory: Path) -> Tower:
    """The tower of a checkpoint, as the engine opens it."""
    recipe = recipe_of(directory, (directory / "tokenizer.json").read_bytes())
    return open_tower(directory, recipe, on_gpu=False)


def features_of(tower: Tower, given: dict[str, Any], patches_max: int = WHOLE) -> list[Features]:
    """Features of each image of a case, in pieces of at most `patches_max` patches."""
    found = []
    for grids in given["images"]:
        job = tower.begin(pixels_of(grids, given["patch"], given["seed"]), [tuple(grid) for grid in grids])
        while job.step(patches_max):
            pass
        found.append(job.features())
    return found


def check(directory: Path, given: dict[str, Any]) -> None:
    """Features, and logits of the whole model from them."""
    tower = tower_of(directory)
    for patches_max in (5, WHOLE):
        features = features_of(tower, given, patches_max)
        for made, main, deep in zip(features, given["features"], given["deep"], strict=True):
            for array, wanted in zip(made.arrays(), [main, *deep], strict=True):
                np.testing.assert_allclose(
                    np.array(array), np.array(wanted, np.float32), atol=NEAR, rtol=1e-4
                )
    if given["config"]["model_type"] in ROTATED:
        # Their positions are facts of rows: see test_families.py.
        return
    model = load(str(directory)).model
    tokens = mx.array([given["prompt"]])
    embedded = model.language_model.model.embed_tokens(tokens)
    places = [place for place, token in enumerate(given["prompt"]) if token == given["token"]]
    embedded[0, mx.array(places)] = mx.concatenate([each.main for each in features])
    logits = model(tokens, input_embeddings=embedded)[0]
    np.testing.assert_allclose(
        np.array(logits[-6:]), np.array(given["logits"], np.float32), atol=1e-4, rtol=1e-3
    )


def test_the_cases_are_those_of_the_script() -> None:
    """None is left out."""
    assert set(NAMES) == set(make_cases.CASES)


@pytest.mark.parametrize("name", NAMES)
def test_features_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Normalisation, positions, attention, merging and projection: a mistake in any of them shows."""
    check(write(tmp_path, case(name)), case(name))


@pytest.mark.parametrize("name", NAMES)
def test_an_image_takes_no_more_memory_than_is_booked_for_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in several parts: MLX starts ten operations ahead, and the parts of one evaluation exist together."""
    for module in (block, layered):
        monkeypatch.setattr(module, "SCORES_BYTES_MAX", 1 << 18)
    recipe = recipe_of(write(tmp_path, case(name)), (tmp_path / "tokenizer.json").read_bytes())
    card = recipe.card
    side = card.tile // card.patch if card.resize.startswith("tiles") else 24
    grids = [(side, side)] * (576 // side**2)
    pixels = np.zeros((576, card.patch_bytes), np.uint8)
    tower = tower_of(tmp_path)
    for patches_max in (100, WHOLE):
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        job = tower.begin(pixels, grids)
        while job.step(patches_max):
            pass
        job.features()
        assert mx.get_peak_memory() - before <= tower.peak_bytes(grids), patches_max
        del job


@pytest.mark.parametrize("name", ["pixtral", "mistral3", "lfm2_vl"])
def test_checkpoints_with_older_names_are_read(name: str, tmp_path: Path) -> None:
    """Published before transformers put both parts below `model`, or converted by mlx-vlm."""
    check(write(tmp_path, case(name), old_names), case(name))


@pytest.mark.parametrize("name", ["internvl", "internvl-rms"])
def test_internvl_is_read_as_its_makers_publish_it(name: str, tmp_path: Path) -> None:
    """Other names, and one array for queries, keys and values."""
    check(internvl_chat(tmp_path, case(name)), case(name))
