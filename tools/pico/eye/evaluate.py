"""Ask pico-eye about pictures that it has not seen: `python -m tools.pico.eye.evaluate DIR [--card]`."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from tools.pico.draw import Draw
from tools.pico.eye.model import BEGIN, CLOSE, FEATURE, FEATURES, GRID
from tools.pico.eye.pictures import scenes_of
from tools.pico.eye.questions import Question, all_questions
from tools.pico.eye.train import patches_of
from tools.pico.markers import ASSISTANT, END, USER
from zmqengine.checkpoint.vision import read_vision
from zmqengine.engine.load.loader import load
from zmqengine.engine.vision.towers.opening import open_tower

ANSWER_TOKENS_MAX = 40


class Eye:
    """A written model, as the engine opens it, that answers greedily."""

    def __init__(self, directory: Path) -> None:
        loaded = load(str(directory))
        recipe = read_vision(directory, loaded.tokenizer.tokenizer_json)
        assert recipe is not None, f"{directory} has no card"
        self._text: Any = loaded.model
        self._tower = open_tower(directory, recipe, on_gpu=False)
        self._tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json.decode())

    def features(self, pixels: np.ndarray) -> mx.array:
        """Features of one picture."""
        job = self._tower.begin(pixels, [GRID])
        while job.step():
            pass
        return job.features().main

    def answers(self, features: mx.array, asked: list[str]) -> list[str]:
        """An answer to each question about one picture."""
        return [self._answer(features, text) for text in asked]

    def _answer(self, features: mx.array, text: str) -> str:
        prompt = f"{USER}{BEGIN}{FEATURE * FEATURES}{CLOSE}{text}{END}{ASSISTANT}"
        ids = self._tokenizer.encode(prompt).ids
        tokens = mx.array([ids])
        embedded = self._text.language_model.model.embed_tokens(tokens)
        embedded[0, 2 : 2 + FEATURES] = features.astype(embedded.dtype)
        cache = make_prompt_cache(self._text)
        logits = self._text(tokens, cache=cache, input_embeddings=embedded)[0, -1]
        said: list[int] = []
        end = self._tokenizer.token_to_id(END)
        while len(said) < ANSWER_TOKENS_MAX:
            token: Any = mx.argmax(logits).item()
            if token == end:
                break
            said.append(token)
            logits = self._text(mx.array([[token]]), cache=cache)[0, -1]
        return str(self._tokenizer.decode(said))


def evaluate(directory: Path, pictures: int, seed: int = 1) -> dict[str, list[int]]:
    """Right answers and questions, by the kind of question, over held-out pictures."""
    eye, draw = Eye(directory), Draw(seed, "held_out")
    right, asked = Counter[str](), Counter[str]()
    for _ in range(pictures):
        scene = scenes_of(draw)
        questions: list[Question] = all_questions(scene)
        features = eye.features(patches_of([scene])[0])
        for question, answer in zip(
            questions, eye.answers(features, [each.text for each in questions]), strict=True
        ):
            asked[question.kind] += 1
            right[question.kind] += answer == question.answer
    return {kind: [right[kind], count] for kind, count in asked.items()}


def card(directory: Path, results: dict[str, list[int]]) -> str:
    """The model's README, with what the evaluation found."""
    rows = "\n".join(f"| {kind} | {right} of {count} |" for kind, (right, count) in results.items())
    record = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    return f"""---
license: apache-2.0
library_name: mlx
---
# pico-eye

A model of {record["parameters"]:,} parameters that sees: pico behind a small tower, in the format of InternVL's
checkpoints. It names the shapes, colors, numbers and digits of pictures like those of `tools/pico/eye/pictures.py`: up
to four things on a white ground, on a grid of three by three. Of any other picture it says something of this kind.

Made of the bundled pico by `{record["command"]}`, in some fifteen minutes of one core.

Exact answers about held-out pictures, greedily (`python -m tools.pico.eye.evaluate DIR --card`):

| question | right |
|---|---|
{rows}
"""


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True))
@click.option("--pictures", default=100, show_default=True)
@click.option("--card", "writes_card", is_flag=True, help="Write the model's README.")
def main(directory: Path, pictures: int, writes_card: bool) -> None:
    """Print how many answers are right, by the kind of question."""
    results = evaluate(directory, pictures)
    if writes_card:
        (directory / "README.md").write_text(card(directory, results), encoding="utf-8")
    json.dump(results, sys.stdout)
    print()


if __name__ == "__main__":
    main()
