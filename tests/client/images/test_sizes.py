"""Sizes, tiles and pixels of images are those of the processors that models were trained with."""

from __future__ import annotations

import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import PIL
import pytest

from tests.client.images.make_processors import picture
from zmqengine.errors import BadRequest
from zmqengine.vision_card import VisionCard, image_hash
from zmqengine_client.images.preparing import ImagePreparation, fitting
from zmqengine_client.images.sizes import layout

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "processors.json").read_text("utf-8"))
MUSE = {"resize": "cells", "filter": "lanczos", "patch": 4, "merge": 2, "pixels_min": 64, "pixels_max": 4096}
CARDS = {**{name: case["card"] for name, case in CASES.items()}, "muse_spark": MUSE}


def card_of(name: str, **more: Any) -> VisionCard:
    """The card of a family in the cases."""
    return VisionCard(kind=name, placeholder=1, token=1, **{**CARDS[name], **more})


@pytest.mark.parametrize("name", CASES)
def test_grids_are_those_of_the_published_processor(name: str) -> None:
    """Every size, from one pixel to narrow strips."""
    card = card_of(name)
    for image in CASES[name]["images"]:
        found = layout(image["size"][0], image["size"][1], card).grids(card)
        assert [list(grid) for grid in found] == image["grids"], image["size"]


@pytest.mark.skipif(PIL.__version__.startswith("12."), reason="Pillow 12 rounds some pixels to other numbers")
@pytest.mark.parametrize("name", [name for name in CASES if name != "lfm2_vl"])
def test_pixels_are_those_of_the_published_processor(name: str) -> None:
    """Byte by byte; LFM2-VL's processor resamples in floats, and rounds elsewhere."""
    card, images = card_of(name), ImagePreparation()
    for image in CASES[name]["images"]:
        written = io.BytesIO()
        picture(*image["size"]).save(written, "PNG")
        made = images.prepare(written.getvalue(), card, 10**6)
        assert made.body is not None
        assert hashlib.blake2b(made.body.pixels, digest_size=8).hexdigest() == image["pixels"], image["size"]
        assert made.facts.hash == image_hash(name, made.facts.grids, made.body.pixels)


def test_muse_spark_is_that_of_mlx_lm() -> None:
    """Sizes by mlx-lm's own processor, where its choice is defined."""
    processor = pytest.importorskip("mlx_lm.processors.muse_spark")
    card = card_of("muse_spark")
    chance = random.Random(3)
    sizes = [(chance.randint(1, 400), chance.randint(1, 400)) for _ in range(300)]
    for width, height in sizes:
        if max(width, height) > 60 * min(width, height):
            continue
        _, (rows, columns) = processor._find_resize_target(
            height, width, patch_h=8, patch_w=8, min_tokens=1, max_tokens=64
        )
        assert layout(width, height, card).grids(card) == [(rows * 2, columns * 2)], (width, height)


@pytest.mark.parametrize("name", CARDS)
def test_every_size_keeps_the_bounds_of_its_card(name: str) -> None:
    """Whole cells, the card's area, and as many patches as the worker takes at most."""
    chance = random.Random(name)
    most = 64
    card = fitting(card_of(name), most)
    for _ in range(400):
        width, height = chance.randint(1, 5000), chance.randint(1, 5000)
        if max(width, height) > 200 * min(width, height):
            continue
        grids = layout(width, height, card).grids(card)
        assert all(rows > 0 and columns > 0 for rows, columns in grids)
        assert card.features(grids) > 0
        if card.resize in ("cells", "longest") or (
            card.resize == "area" and max(width, height) < 8 * min(width, height)
        ):
            assert card.patches(grids) <= most


def test_a_strip_is_refused() -> None:
    """Qwen's own processor refuses it too."""
    with pytest.raises(BadRequest, match="too narrow"):
        layout(2010, 10, card_of("qwen2_vl"))


def test_a_fixed_size_is_one_square() -> None:
    """Whatever the picture."""
    card = card_of("pixtral", resize="fixed", tile=64)
    assert layout(900, 20, card).grids(card) == [(8, 8)]
