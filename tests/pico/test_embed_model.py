"""pico-embed, and how it is made."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.pico.draw import Draw, split_of
from tools.pico.embedding.directory import write_model
from tools.pico.embedding.evaluate import card, found, sentences, vectors, word_counts
from tools.pico.embedding.events import any_event
from tools.pico.embedding.held_out_pairs import HELD_OUT_PAIRS
from tools.pico.embedding.pairs import pairs
from tools.pico.embedding.train import Plan, batches, train
from zmqengine.pico import model_path

PATH = model_path("pico-embed")
RIGHT_MIN = 80
"""Of 100; by chance it is one."""


def test_sentences_written_by_hand_find_their_partners() -> None:
    """Vectors with meaning, of texts that no program made."""
    texts = sentences()
    assert len(texts) == 100
    assert found(vectors(PATH, texts)) >= RIGHT_MIN
    assert found(np.random.default_rng(0).normal(size=(100, 128))) < 10


def test_the_hand_written_sentences_are_not_in_the_training() -> None:
    """Neither do they repeat each other."""
    trained = {text for pair in islice(pairs("train", 2), 20_000) for text in pair[:2]}
    texts = sentences()
    assert len(set(texts)) == 2 * len(HELD_OUT_PAIRS)
    assert not trained & set(texts)


def test_the_card_has_the_figures_of_the_model() -> None:
    """It is written by `python -m tools.pico.embedding.evaluate DIR --card`."""
    assert (PATH / "README.md").read_text(encoding="utf-8") == card(PATH)
    assert found(word_counts(sentences())) > 0


def test_the_model_is_small() -> None:
    """It comes with every installation."""
    assert sum(path.stat().st_size for path in PATH.rglob("*") if path.is_file()) < 5 << 20


def test_pairs_come_from_a_seed_and_keep_to_their_split() -> None:
    """Both halves of a pair are of one event, and events of the two splits differ."""
    first, again = (list(islice(pairs("train", 5), 300)) for _ in range(2))
    assert first == again
    assert all(pair.left != pair.right for pair in first)
    for split in ("train", "held_out"):
        assert {split_of(any_event(Draw(1, split)).key) for _ in range(20)} == {split}


def test_a_batch_has_no_event_twice() -> None:
    """It would be pushed away from itself."""
    batch = next(batches(Plan(batch=64)))
    assert len({pair.key for pair in batch}) == len(batch) == 64


def test_a_short_training_learns_and_writes_a_model_that_can_be_read(tmp_path: Path) -> None:
    """The loss falls, and what is written gives the vectors that were trained."""
    lines: list[str] = []
    plan = Plan(steps=50, batch=16, vocabulary_size=600, width=32, layers=1, rate=0.005)
    model, tokenizer, config, recent = train(plan, lines.append)
    assert recent < np.log(16)
    write_model(tmp_path, model, config, tokenizer)
    made = vectors(tmp_path, ["The fox lost a ball.", "A ball was missing."])
    assert made.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"


def test_any_text_has_tokens() -> None:
    """Words that were never seen are spelled."""
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    assert "[UNK]" not in tokenizer.encode("Zebra 42, quixotic!").tokens
