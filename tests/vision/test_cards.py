"""The card of a checkpoint says what its makers' image processor would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vision.checkpoints import case, internvl_chat, write
from zmqengine.checkpoint.vision import VisionRecipe, read_vision, why_blind
from zmqengine.errors import ModelLoadError
from zmqengine.vision_card import VisionCard


def recipe_of(directory: Path) -> VisionRecipe | None:
    """The recipe as the loader reads it."""
    return read_vision(directory, (directory / "tokenizer.json").read_bytes())


def card_of(directory: Path) -> VisionCard:
    """The card of a model that sees."""
    recipe = recipe_of(directory)
    assert recipe is not None
    return recipe.card


CARDS: dict[str, VisionCard] = {
    "pixtral": VisionCard(
        kind="pixtral", patch=4, merge=1, resize="longest", filter="bicubic", side_max=32, placeholder=10, token=10,
        line_end=[11], end=[12],
    ),
    "mistral3": VisionCard(
        kind="pixtral", patch=4, merge=2, resize="longest", filter="bicubic", side_max=32, placeholder=10, token=10,
        line_end=[11], end=[12],
    ),
    "lfm2_vl": VisionCard(
        kind="lfm2_vl", patch=4, merge=2, resize="tiles_area", filter="bilinear", pixels_min=128, pixels_max=384,
        tile=16, tiles_min=2, tiles_max=4, pixels_split=768, overview=True, placeholder=10, token=10, begin=[11],
        end=[12], tile_begin=[[[14], [15]], [[16], [17]]], overview_begin=[13],
    ),
    "idefics3": VisionCard(
        kind="idefics3", patch=4, merge=2, resize="tiles", filter="lanczos", side_max=32, tile=16, overview=True,
        placeholder=10, token=10, single_begin=[11, 12], end=[11], row_end=[88], overview_begin=[89, 11, 12],
        tile_begin=[[[11, 13], [11, 14]]],
    ),
    "smolvlm": VisionCard(
        kind="idefics3", patch=4, merge=4, resize="tiles", filter="lanczos", side_max=64, tile=32, overview=True,
        placeholder=10, token=10, single_begin=[11, 12], end=[11], row_end=[88], overview_begin=[89, 11, 12],
        tile_begin=[[[11, 13], [11, 14]]],
    ),
    "internvl": VisionCard(
        kind="internvl", patch=4, merge=2, resize="tiles_ratio", filter="bicubic", tile=16, tiles_min=1, tiles_max=4,
        overview=True, placeholder=10, token=10, begin=[11], end=[12],
    ),
    "qwen3_5": VisionCard(
        kind="qwen3_5", patch=4, merge=2, resize="area", filter="bicubic", pixels_min=128, pixels_max=1024,
        placeholder=10, token=10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_the_numbers_and_tokens_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Rules, bounds, and the ids of markers from its tokenizer."""
    assert card_of(write(tmp_path, case(name))) == CARDS[name]


def test_internvl_has_one_card_in_both_forms(tmp_path: Path) -> None:
    """OpenGVLab's config has the numbers that transformers puts into the processor's."""
    assert card_of(internvl_chat(tmp_path, case("internvl"))) == CARDS["internvl"]


def test_numbers_of_the_processor_are_found_inside_that_of_text_and_images(tmp_path: Path) -> None:
    """Newer releases write one file for both."""
    write(tmp_path, case("pixtral"))
    inside = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inside}))
    assert card_of(tmp_path) == CARDS["pixtral"]


def test_images_that_are_not_split_need_no_markers_of_tiles(tmp_path: Path) -> None:
    """`do_image_splitting` false."""
    given = case("lfm2_vl")
    write(tmp_path, {**given, "processor": {**given["processor"], "do_image_splitting": False}})
    card = card_of(tmp_path)
    assert (card.resize, card.tile, card.tile_begin, card.overview) == ("area", 0, [], False)


def test_a_model_of_text_has_no_card_and_needs_no_reason(tmp_path: Path) -> None:
    """Nobody expects it to see."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_vision(tmp_path, b"") is None
    assert why_blind(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma3", "vision_config": {}}, "both directions"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}, "Pixtral"),
        ({"model_type": "paligemma", "vision_config": {}}, "not known"),
    ],
)
def test_a_tower_that_is_not_supported_is_refused_by_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The model still serves text; whoever sends it an image learns why it does not see."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vision(tmp_path, b"") is None
    reason = why_blind(tmp_path)
    assert reason is not None
    assert config["model_type"] in reason
    assert words in reason


def test_a_tokenizer_without_the_markers_is_an_error_that_names_them(tmp_path: Path) -> None:
    """A conversion may have lost them."""
    write(tmp_path, case("internvl"))
    text = (tmp_path / "tokenizer.json").read_text().replace("</img>", "</lost>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match="</img>"):
        recipe_of(tmp_path)
