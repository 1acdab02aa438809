"""A small training run learns, and writes a directory that mlx-lm loads."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from tools.pico.card import write_card
from tools.pico.evaluate import evaluate
from tools.pico.train import Outcome, Plan, train, write


@pytest.fixture(scope="module")
def smoke() -> tuple[Outcome, list[str]]:
    """Fifty steps of a model of one narrow layer."""
    lines: list[str] = []
    plan = Plan(
        steps=50, batch_tokens=512, copying_documents=0, vocabulary_size=400, width=32, layers=1, seed=5
    )
    return train(plan, lines.append), lines


@pytest.mark.weekly
def test_the_loss_goes_down(smoke: tuple[Outcome, list[str]]) -> None:
    """From the loss of a guess among all tokens to well below it, on documents held out."""
    outcome, lines = smoke
    assert outcome.first_loss == pytest.approx(math.log(400), rel=0.1)
    assert outcome.held_out_loss < outcome.first_loss - 1
    assert lines[0].startswith("step 50/50")


@pytest.mark.weekly
def test_what_is_written_loads_and_can_be_measured(smoke: tuple[Outcome, list[str]], tmp_path: Path) -> None:
    """mlx-lm loads the directory, and the evaluation writes its card from figures."""
    write(tmp_path, smoke[0])
    pair: Any = mlx_lm.load(str(tmp_path))
    assert isinstance(mlx_lm.generate(pair[0], pair[1], "Once upon", max_tokens=3), str)
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["command"].endswith(
        "--steps 50 --batch-tokens 512 --copying-documents 0 --vocabulary-size 400 --width 32 --layers 1 --seed 5"
    )
    figures = asdict(evaluate(tmp_path, story_count=2, chat_count=2))
    assert figures["held_out_loss"] > 1
    write_card(tmp_path, figures)
    assert f"{figures['held_out_loss']:.4f}" in (tmp_path / "README.md").read_text()
