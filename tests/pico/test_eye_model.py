"""pico-eye, and how it is made."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tools.pico.draw import Draw, split_of
from tools.pico.eye.evaluate import card, evaluate
from tools.pico.eye.model import FEATURES, GRID
from tools.pico.eye.pictures import SIDE, Scene, Thing, picture, scenes_of
from tools.pico.eye.questions import all_questions, describe, questions_of
from tools.pico.eye.train import Plan, patches_of, train
from zmqengine.pico import model_path

PATH = model_path("pico-eye")
RIGHT_MIN = 0.75
"""The least share of right answers. Of a hundred pictures it has nine in ten; the usual answer to each question, given
without a look at the picture, is right for one in four."""


def test_it_answers_about_pictures_that_it_has_not_seen() -> None:
    """Through the loader, the card and the tower of the engine."""
    results = evaluate(PATH, pictures=6)
    right, asked = (sum(counts) for counts in zip(*results.values(), strict=True))
    assert asked > 20
    assert right >= RIGHT_MIN * asked


def test_the_card_is_written_by_the_program() -> None:
    """`python -m tools.pico.eye.evaluate DIR --card`; the figures are of a hundred pictures."""
    written = (PATH / "README.md").read_text(encoding="utf-8")
    assert card(PATH, {}).strip() == written[: written.index("| describe |")].strip()


def test_the_model_is_small() -> None:
    """It comes with every installation."""
    assert (PATH / "model.safetensors").stat().st_size < 4 << 20


def test_scenes_come_from_a_seed_and_keep_to_their_split() -> None:
    """A picture of the evaluation is in no training."""
    for split in ("train", "held_out"):
        draws = [Draw(5, split), Draw(5, split)]
        first, again = ([scenes_of(draw) for _ in range(50)] for draw in draws)
        assert first == again
        assert {split_of(scene.key) for scene in first} == {split}


def test_questions_are_answered_by_the_scene() -> None:
    """Alike things are counted, and no question is asked about things that are not told apart."""
    scene = Scene(
        (
            Thing("circle", "red", 0, 0),
            Thing("circle", "red", 0, 2),
            Thing("square", "blue", 1, 1),
            Thing("7", "green", 2, 2),
        )
    )
    assert describe(scene) == "Two red circles, a blue square and a green digit 7."
    answers = {question.text: question.answer for question in all_questions(scene)}
    assert answers["How many things are there?"] == "Four."
    assert answers["How many circles are there?"] == "Two."
    assert answers["What color is the square?"] == "Blue."
    assert answers["Which digit do you see?"] == "7."
    assert answers["What is green?"] == "A digit."
    assert "What is red?" not in answers
    assert "What color is the circle?" not in answers
    assert describe(Scene(())) == "Nothing."


def test_pixels_are_those_that_a_front_end_makes() -> None:
    """Patches in row-major order of the small picture."""
    scene = Scene((Thing("square", "black", 0, 0, size=1.0),))
    patches = patches_of([scene])
    assert patches.shape == (1, GRID[0] * GRID[1], 192)
    assert patches[0, 0].max() < 60
    assert patches[0, -1].min() > 250
    assert np.asarray(picture(scene, SIDE)).shape == (SIDE, SIDE, 3)
    assert FEATURES == 9


@pytest.mark.weekly
def test_training_can_be_repeated_in_small(tmp_path: Path) -> None:
    """A few steps write a whole model."""
    lines: list[str] = []
    train(
        Plan(look_steps=10, look_pictures=8, talk_steps=10, talk_pictures=1, talk_questions=2),
        lines.append,
        tmp_path,
    )
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json", "training.json",
    }  # fmt: skip
    assert any(line.startswith("talk: step 10/10") for line in lines)
    scene = next(islice((scenes_of(Draw(1, "train")) for _ in range(9)), 1))
    assert questions_of(scene, Draw(2, "train"), 4)[0].kind == "describe"
