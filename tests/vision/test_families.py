"""Every family from its checkpoint to tokens: rows with images in the engine make what one plain call makes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from tests.support.engines import engine_options, finish
from tests.support.eyes import request_of
from tests.support.images import Picture
from tests.vision.checkpoints import NAMES, case, write
from tests.vision.make_cases import pixels_of
from tests.vision.test_towers import ROTATED, tower_of
from zmqengine.checkpoint.estimate import LEAST_TOKENS, open_checkpoint
from zmqengine.engine.interface import RowImage, RowRequest
from zmqengine.engine.load.loader import load
from zmqengine.engine.open import OpenedEngine, open_mlx_engine
from zmqengine.pico import model_path
from zmqengine.vision_card import image_hash

COUNT = 6


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_sees_in_the_engine(name: str, tmp_path: Path) -> None:
    """Beside a row of text, read in chunks, by whichever code runs the text; the card goes out with the tokenizer."""
    given = case(name)
    directory = write(tmp_path, given)
    # To measure verify blocks takes as long as all the rest.
    options = engine_options(
        {"prefill_chunk": 16, "warm_up_s": 0.0, "prompt_cache_bytes": 0, "speculate": "off"}
    )
    opened = open_mlx_engine(str(directory), options)
    card = opened.engine.info.vision
    assert card is not None
    assert opened.tokenizer.vision == card
    assert opened.engine.info.image_patches_max >= 64
    pictures = [
        Picture(card, tuple((rows, columns) for rows, columns in grids), seed=seed)
        for seed, grids in enumerate(given["images"])
    ]
    parts = [part for picture in pictures for part in ([1, 2, 3], picture)]
    request = request_of(0, *parts, [4, 5], max_tokens=COUNT)
    opened.engine.insert([request, request_of(1, [6, 7, 8], max_tokens=COUNT)])
    run = finish(opened.engine)
    assert not run.failures

    if name in ROTATED:
        return
    model, tower = load(str(directory)).model, tower_of(directory)
    tokens = mx.array(list(request.prompt))
    embedded = model.language_model.model.embed_tokens(tokens)
    for picture, image in zip(pictures, request.images, strict=True):
        job = tower.begin(
            np.frombuffer(picture.pixels, np.uint8).reshape(-1, card.patch_bytes), picture.grids
        )
        while job.step():
            pass
        span = np.array(request.prompt[image.at : image.at + image.tokens])
        embedded[mx.array(image.at + np.flatnonzero(span == card.token))] = job.features().main
    steps = generate_step(tokens, model, max_tokens=COUNT, input_embeddings=embedded)
    assert run.ids(0) == [int(token) for _, (token, _) in zip(range(COUNT), steps, strict=False)]
    opened.engine.close()


@pytest.mark.parametrize(("chunk", "alone"), [(512, True), (7, False)])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, chunk: int, alone: bool, tmp_path: Path) -> None:
    """From pixels to tokens, in chunks of any length, beside a row of text, twice: found in the prefix cache, too."""
    check_tokens(write(tmp_path, case(name)), case(name), chunk, alone=alone)


def test_a_model_that_has_no_memory_for_an_image_says_how_much_it_takes(tmp_path: Path) -> None:
    """It still serves text; the reason goes out with the tokenizer, and its number is the least that does."""
    directory = write(tmp_path, case("smolvlm"))
    options = engine_options({"warm_up_s": 0.0, "speculate": "off"})

    def opened(limit_bytes: int) -> OpenedEngine:
        found = open_mlx_engine(str(directory), options, limit_memory=lambda *_: limit_bytes)
        found.engine.close()
        return found

    blind = opened(256 << 20)
    assert blind.engine.info.vision is None
    told = re.fullmatch(
        r"no image fits .* --memory-limit (\d+)MiB is .*", str(blind.tokenizer.facts["blind"])
    )
    assert told is not None
    assert opened((int(told[1]) - 1) << 20).engine.info.vision is None
    assert opened(int(told[1]) << 20).engine.info.image_patches_max > 0


def test_what_a_model_that_sees_needs_has_room_for_an_image_and_a_chat() -> None:
    """A launcher gives it that at least, and says that it sees."""
    checkpoint = open_checkpoint(model_path("pico-eye"))
    assert "vision" in checkpoint.capabilities
    limit = checkpoint.need_bytes(on_gpu=False)
    options = engine_options({"warm_up_s": 0.0, "speculate": "off"})
    opened = open_mlx_engine(str(checkpoint.directory), options, limit_memory=lambda *_: limit)
    engine = opened.engine
    assert engine.info.vision is not None
    assert engine.info.image_patches_max >= engine.info.vision.merge**2
    left = checkpoint.kv_budget(limit) - engine.padding_bytes_max - engine.images_bytes_max
    assert left >= checkpoint.shape.bytes_for(LEAST_TOKENS, checkpoint.weights.float_bytes)
    engine.close()


def test_qwen2_vl_is_read_as_it_was_published(tmp_path: Path) -> None:
    """The text's numbers and the tower's are in one config, and positions are a scaling of their own type."""
    given = case("qwen2_vl")
    config = dict(given["config"])
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = {**text, **config, "rope_theta": 10_000.0}

    def old(name: str) -> str:
        return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)

    check_tokens(write(tmp_path, {**given, "config": flat}, old), given, 16, alone=True)


def check_tokens(directory: Path, given: dict[str, Any], chunk: int, *, alone: bool) -> None:
    """Greedy tokens of a case by the engine, in chunks; else than `alone` beside a row of text and twice."""
    # To measure verify blocks takes as long as all the rest.
    options = engine_options(
        {"prefill_chunk": chunk, "prefill_chunk_idle": chunk, "warm_up_s": 0.0, "speculate": "off"}
    )
    opened = open_mlx_engine(str(directory), options)
    card = opened.engine.info.vision
    assert card is not None
    images, places = [], [place for place, token in enumerate(given["prompt"]) if token == given["token"]]
    for grids in given["images"]:
        own, places = places[: card.features(grids)], places[card.features(grids) :]
        pixels = pixels_of(grids, given["patch"], given["seed"]).tobytes()
        made = [(rows, columns) for rows, columns in grids]
        images.append(
            RowImage(image_hash(card.kind, made, pixels), own[0], own[-1] + 1 - own[0], made, pixels)
        )
    count = len(given["greedy"])
    request = RowRequest(0, given["prompt"], count, images=images)
    if alone:
        opened.engine.insert([request])
        assert finish(opened.engine).ids(0) == given["greedy"]
    else:
        beside = RowRequest(1, [6, 7, 8] * 9, count + 9)
        opened.engine.insert([request, beside])
        run = finish(opened.engine)
        assert run.ids(0) == given["greedy"]
        opened.engine.insert([replace(request, row=2)])
        assert finish(opened.engine, run).ids(2) == given["greedy"]
    opened.engine.close()
