"""A small run that makes pico-tools of a model: it goes on after it was stopped, and writes what mlx-lm loads."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from tools.pico import tokens as first_tokens
from tools.pico.directory import model_config, write_model
from tools.pico.tools import corpus as tool_corpus
from tools.pico.tools import train as training
from tools.pico.tools.card import write_card
from tools.pico.tools.checkpoints import Checkpoints
from tools.pico.tools.evaluate import Chats, Figures, evaluate_tools
from tools.pico.tools.new_tokens import new_embeddings
from tools.pico.tools.plan import Plan
from tools.pico.tools.positions import gaps
from tools.pico.tools.tokens import train_tokenizer
from tools.pico.tools.train import Outcome, train, write

PLAN = Plan(
    seed=5,
    tokenizer_documents=200,
    pieces=400,
    spaced_words=100,
    batch_tokens=512,
    tool_steps=20,
    name_steps=5,
    name_fall_steps=20,
    near_steps=5,
    near_fall_steps=5,
    short_batch_tokens=512,
    short_steps=5,
    last_steps=10,
    long_tokens=300,
    held_out_documents=20,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one narrow layer that knows nothing."""
    directory = tmp_path_factory.mktemp("start")
    tokenizer = first_tokens.train_tokenizer(["Tom has a red ball. Tom is happy. What is red?"] * 5, 300)
    config = model_config(tokenizer.get_vocab_size(), 32, 1, 0)
    mx.random.seed(1)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    write_model(directory, model, config, tokenizer, first_tokens.CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def smoke(start: Path) -> tuple[Outcome, list[str]]:
    """The whole run, never stopped."""
    lines: list[str] = []
    return train(PLAN, lines.append, Checkpoints(None), start), lines


def weights(outcome: Outcome) -> dict[str, list[float]]:
    """Every weight, to compare."""
    flat: dict[str, Any] = dict(tree_flatten(outcome.model.parameters()))
    return {name: array.tolist() for name, array in flat.items()}


@pytest.mark.weekly
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    start: Path, smoke: tuple[Outcome, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first stage, and started again with the same directory."""

    class Stopped(Exception):
        """In place of a SIGKILL."""

    class StopsAtStep12(Checkpoints):
        def save(self, stage: str, model: Any, optimizer: Any, steps: int) -> None:
            super().save(stage, model, optimizer, steps)
            if (stage, steps) == ("tools", 12):
                raise Stopped

    monkeypatch.setattr(training, "_SAVE_EVERY_S", 0.0)
    with pytest.raises(Stopped):
        train(PLAN, print, StopsAtStep12(tmp_path), start)
    resumed = train(PLAN, print, Checkpoints(tmp_path), start)
    assert weights(resumed) == weights(smoke[0])


@pytest.mark.weekly
def test_the_loss_goes_down(smoke: tuple[Outcome, list[str]]) -> None:
    """Below that of a guess among all tokens, on documents held out."""
    outcome, lines = smoke
    assert outcome.held_out_loss < 5
    assert lines[-1].startswith("held-out loss")


@pytest.mark.weekly
def test_what_is_written_loads_and_has_a_card(smoke: tuple[Outcome, list[str]], tmp_path: Path) -> None:
    """mlx-lm loads the directory; the card holds the command and the figures."""
    write(tmp_path, smoke[0])
    pair: Any = mlx_lm.load(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    (measured,) = evaluate_tools(*pair, [Chats("system", 0, 2, 1, 1)])  # type: ignore[call-arg]
    assert (measured.asked, measured.unmet) == (1, 1)
    write_card(tmp_path, asdict(Figures((measured,), (3, 7), {"counting": (1, 2)})))
    card = (tmp_path / "README.md").read_text()
    assert "--seed 5 --tokenizer-documents 200" in card
    assert "3 of 7" in card
    assert "| counting | 1 | 2 |" in card


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer, learnt from few documents."""
    texts = [document.text for document in islice(tool_corpus.documents("train", 1), 1500)]
    return train_tokenizer(texts, 700, 200)


def test_a_word_is_cut_alike_with_and_without_a_space_before_it(tokenizer: Tokenizer) -> None:
    """What a user writes after a space is copied into quotes piece by piece."""
    for word in ("weather", "Lisbon", "Kozura", "get", "Zażółć"):
        bare = tokenizer.encode(word).tokens
        spaced = tokenizer.encode(" " + word).tokens
        # A space of its own, or the first piece with one.
        assert spaced in (["\u0120", *bare], ["\u0120" + bare[0], *bare[1:]]), (bare, spaced)


def test_common_words_hold_their_space(tokenizer: Tokenizer) -> None:
    """Plain text stays short."""
    assert tokenizer.encode("there was a little").tokens == ["there", "\u0120was", "\u0120a", "\u0120little"]


def test_a_new_token_begins_with_the_mean_of_the_old_ones_of_its_text(tokenizer: Tokenizer) -> None:
    """And a token that was there before keeps its embedding."""
    first = first_tokens.train_tokenizer(["Tom has a red ball. Tom is happy. What is red?"] * 5, 300)
    old = mx.random.normal((first.get_vocab_size(), 8))
    new = new_embeddings(old, first, tokenizer)
    assert new.shape == (tokenizer.get_vocab_size(), 8)
    end = "<|end|>"
    assert mx.array_equal(new[tokenizer.token_to_id(end)], old[first.token_to_id(end)])
    for token in ("weather", "<tool_call>"):
        assert first.token_to_id(token) is None
        expected = old[mx.array(first.encode(token).ids)].mean(axis=0)
        assert mx.allclose(new[tokenizer.token_to_id(token)], expected)


@pytest.mark.weekly
def test_a_gap_moves_what_comes_after_it_and_is_gone_afterwards(smoke: tuple[Outcome, list[str]]) -> None:
    """Rotations from the gap on are those of the later positions."""
    model = smoke[0].model
    attention = model.model.layers[0].self_attn
    plain = attention.rope
    x = mx.random.normal((1, 1, 6, 32))
    with gaps(model, 8192, share=0.5, seed=1) as positions:
        drawn = False
        while not drawn:
            positions.draw(6)
            drawn = attention.rope.distance > 0
        start, distance = attention.rope.start, attention.rope.distance
        moved = attention.rope(x)
    assert 0 < start < 6
    assert start + distance + 6 - start <= 8192
    assert mx.array_equal(moved[:, :, :start], plain(x)[:, :, :start])
    assert mx.allclose(moved[:, :, start:], plain(x[:, :, start:], offset=start + distance))
    assert attention.rope is plain
