"""Models of random weights, and prompts for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlx_lm import load
from mlx_lm.generate import batch_generate

from tests.support.engines import finish
from zmqengine.bench.load.prompts import prompts_for, vocabulary_of_file
from zmqengine.bench.models import random_model
from zmqengine.bench.models.model_facts import model_directory, model_facts
from zmqengine.bench.models.model_shapes import SHAPES, ModelShape
from zmqengine.bench.models.random_model import make_model, model_directory_of
from zmqengine.bench.targets.target import TargetError
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "0.2m"
    make_model("0.2m", SHAPES["0.2m"], path)
    return path


def test_mlx_lm_loads_it_and_no_answer_ends_early(model_path: Path) -> None:
    """Every answer has exactly the tokens asked for, all of them whole ASCII text."""
    model, tokenizer = load(str(model_path))[:2]
    prompts = prompts_for(vocabulary_of_file(model_path / "tokenizer.json"), "x")
    requests = [prompts.request(size, 40).prompt_ids for size in (1, 7, 64)]
    answers = batch_generate(model, tokenizer, requests, max_tokens=40, return_token_ids=True)
    assert answers.token_ids is not None
    assert [len(ids) for ids in answers.token_ids] == [40, 40, 40]
    for ids in answers.token_ids:
        assert all(tokenizer.decode([id_]).isascii() for id_ in ids)


def test_the_same_seed_makes_the_same_model(tmp_path: Path, model_path: Path) -> None:
    """So that two machines can measure the same thing."""
    make_model("0.2m", SHAPES["0.2m"], tmp_path)
    for name in ("tokenizer.json", "model-00001.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (model_path / name).read_bytes()


def test_a_quantised_one_answers_to_the_end_too(tmp_path: Path) -> None:
    """Four bits, and the tokens that must not come still do not."""
    make_model("0.2m", SHAPES["0.2m"], tmp_path, bits=4)
    model, tokenizer = load(str(tmp_path))[:2]
    answers = batch_generate(model, tokenizer, [[100, 200, 300]], max_tokens=40, return_token_ids=True)
    assert answers.token_ids is not None
    assert len(answers.token_ids[0]) == 40


# The other families repeat on these shapes what tests/engine/models has of small ones.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "qwen3.5-25m" else pytest.mark.weekly)
        for name in SHAPES
        if name.endswith("-25m")
    ],
)
def test_every_family_answers_to_the_end_with_the_tokens_of_mlx_lm(tmp_path: Path, name: str) -> None:
    """mlx-lm and the engine read the weights alike."""
    made = make_model(name, SHAPES[name], tmp_path)
    assert made / 1e6 == pytest.approx(25, rel=1 / 4)
    facts = model_facts(str(tmp_path))
    assert (facts.parameters, facts.random_weights) == (made, True)
    model, tokenizer = load(str(tmp_path))[:2]
    answers = batch_generate(model, tokenizer, [[100, 200, 300]], max_tokens=20, return_token_ids=True)
    assert answers.token_ids is not None
    opened = open_mlx_engine(str(tmp_path), EngineOptions(warm_up_s=0))
    assert opened.facts["model_code"] == "ours"
    opened.engine.insert([RowRequest(1, [100, 200, 300], 20)])
    assert [token.token for token in finish(opened.engine).tokens[1]] == answers.token_ids[0]
    assert len(answers.token_ids[0]) == 20


def test_a_model_is_named_by_its_shape_and_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of shapes have dashes of their own."""
    made: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        random_model, "make_model", lambda name, shape, out, *, bits: made.append((name, bits))
    )
    for name in ("25m", "25m-4bit", "gpt-oss-25m", "gpt-oss-25m-8bit"):
        assert model_directory_of(name, tmp_path) == tmp_path / name
    assert made == [("25m", None), ("25m", 4), ("gpt-oss-25m", None), ("gpt-oss-25m", 8)]
    with pytest.raises(TargetError, match="no model gpt"):
        model_directory_of("gpt-4bit", tmp_path)


def test_a_report_says_that_the_weights_are_random(model_path: Path) -> None:
    """The directory itself carries it; pico does not."""
    facts = model_facts(str(model_path))
    assert facts.random_weights
    assert facts.parameters == 205_120
    assert not model_facts("pico").random_weights


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """With the command that makes one."""
    with pytest.raises(TargetError, match="zmqengine bench model"):
        model_directory(str(tmp_path))


@pytest.mark.parametrize("tokens", [1, 16, 64, 1000])
def test_prompts_have_exactly_the_tokens_asked_for(model_path: Path, tokens: int) -> None:
    """And a prefix adds up."""
    prompts = prompts_for(vocabulary_of_file(model_path / "tokenizer.json"), "x")
    prefix = prompts.text(10)
    assert len(prompts.request(tokens, 1).prompt_ids) == tokens
    assert len(prompts.request(tokens, 1, prefix=prefix).prompt_ids) == tokens + 10


def test_prompts_of_one_seed_are_the_same_and_of_another_are_not(model_path: Path) -> None:
    """So that a prompt cache helps nobody by accident."""
    prompts = prompts_for(vocabulary_of_file(model_path / "tokenizer.json"), "x")
    assert prompts.reseeded("a").text(50) == prompts.reseeded("a").text(50)
    assert prompts.reseeded("a").text(50) != prompts.reseeded("b").text(50)


def test_the_config_is_that_of_a_llama(model_path: Path) -> None:
    """As mlx-lm and others read it."""
    config = json.loads((model_path / "config.json").read_text())
    shape: ModelShape = SHAPES["0.2m"]
    assert (config["model_type"], config["hidden_size"], config["vocab_size"]) == (
        "llama",
        64,
        shape.vocabulary,
    )
