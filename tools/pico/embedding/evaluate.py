"""How often pico-embed finds a sentence's partner: `python -m tools.pico.embedding.evaluate DIR [--card]`.

Of 50 pairs written by hand, each sentence asks for its partner among the 99 others: 100 questions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from tools.pico.embedding.held_out_pairs import HELD_OUT_PAIRS
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.embedding.encoder_model import load_encoder
from zmqengine.engine.embedding.packing import Packed
from zmqengine.engine.embedding.pooling import pool
from zmqengine.engine.open import find_encoder_backend
from zmqengine.engine.texts.pooling import unit


def vectors(directory: Path, texts: Sequence[str]) -> np.ndarray:
    """Vectors of texts by the model in a directory."""
    recipe = read_recipe(directory)
    encoder, _, _ = load_encoder(directory, recipe, find_encoder_backend())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    packed = Packed([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])
    states = encoder.start(packed)
    for layer in encoder.layers:
        states = layer(states, packed)
    made: mx.array = unit(pool(encoder.finish(states), packed, recipe.pooling or "mean"))
    return np.array(made)


def word_counts(texts: Sequence[str]) -> np.ndarray:
    """Vectors of texts by their words alone, rare ones counting more: what meaning has to beat."""
    words = [Counter(text.lower().translate({ord(mark): None for mark in ".,?!'"}).split()) for text in texts]
    places = {word: place for place, word in enumerate(sorted({word for each in words for word in each}))}
    seen = Counter(word for each in words for word in each)
    made = np.zeros((len(texts), len(places)))
    for row, each in zip(made, words, strict=True):
        for word, count in each.items():
            row[places[word]] = count / sqrt(seen[word])
    counts: np.ndarray = made / np.linalg.norm(made, axis=1, keepdims=True)
    return counts


def found(made: np.ndarray) -> int:
    """Of vectors in which each is followed or led by its partner: how many have it as nearest neighbour."""
    near = made @ made.T
    np.fill_diagonal(near, -np.inf)
    partners = np.arange(len(made)) ^ 1
    return int((near.argmax(axis=1) == partners).sum())


def sentences() -> list[str]:
    """The sentences of all pairs, partners side by side."""
    return [sentence for pair in HELD_OUT_PAIRS for sentence in pair]


def card(directory: Path) -> str:
    """The model's README.md."""
    texts = sentences()
    right, by_words = found(vectors(directory, texts)), found(word_counts(texts))
    record = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    return f"""# pico-embed

A BERT of {record["parameters"] / 1e6:.1f} million parameters that turns sentences of pico's small world into vectors of
128 floats; a text has at most 256 tokens. It is for tests and for trying things out: it knows the words of the
stories in `tools/pico`, and little else.

- Trained by `{record["command"]}`
  on pairs of sentences that were made by programs: two tellings of one event, a question and what answers it.
- Of {len(texts)} sentences written by hand, {right} have their partner as nearest neighbour among the {len(texts) - 1}
  others. By their words alone it would be {by_words}.
- It is in the form of sentence-transformers: BERT, the mean of its states, length 1.
"""


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True))
@click.option("--card", "writes_card", is_flag=True, help="Write the model's README.md as well.")
def main(directory: Path, writes_card: bool) -> None:
    """Evaluate a model like the bundled one."""
    texts = sentences()
    print(
        f"found {found(vectors(directory, texts))} of {len(texts)}, by words alone {found(word_counts(texts))}"
    )
    if writes_card:
        (directory / "README.md").write_text(card(directory), encoding="utf-8")


if __name__ == "__main__":
    main()
