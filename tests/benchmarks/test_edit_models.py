"""The models that were trained to edit JSON do, and drafts save them most of their steps."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from tokenizers import Tokenizer

from benchmarks.speculation import edit
from benchmarks.speculation.edit.documents import FIELDS_MAX, edits
from benchmarks.speculation.edit.models import Asked, ask, load_bundled
from benchmarks.speculation.edit.train import Plan, held_out, train, write
from tests.support.drafts import by_worth
from tests.support.engines import engine_options, finish, runner_of
from zmqengine.engine.load.loader import LoadedModel
from zmqengine.engine.speculation.build import open_draft_model
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.step.mlx_engine import MlxEngine

DOCUMENTS = 8


@pytest.fixture(scope="module")
def large() -> LoadedModel:
    return load_bundled("model")


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return load_bundled("draft")


@pytest.fixture(scope="module")
def asked(large: LoadedModel) -> list[Asked]:
    """Of documents with as many fields as the models have learnt, with words that they have not."""
    return ask(large, list(islice(edits("held_out", 7, FIELDS_MAX), DOCUMENTS)))


@pytest.fixture(scope="module")
def plain(large: LoadedModel, asked: list[Asked]) -> list[list[int]]:
    """What the model says of them without drafts."""
    engine = MlxEngine(runner_of(large.model), large.info, engine_options({}))
    assert engine.insert([one.request for one in asked]) == []
    run = finish(engine)
    return [run.ids(one.request.row) for one in asked]


@pytest.mark.weekly
def test_documents_that_nobody_has_seen_are_edited(large: LoadedModel) -> None:
    """Nearly every token is right, and half of the documents are right in every token."""
    tokenizer = Tokenizer.from_str(large.tokenizer.tokenizer_json.decode())
    exact, right = held_out(large.model, tokenizer, 40)
    assert exact >= 0.5
    assert right >= 0.98


def test_the_draft_model_is_a_quarter_at_most_and_both_are_small(
    large: LoadedModel, small: LoadedModel
) -> None:
    assert 4 * small.info.parameter_bytes <= large.info.parameter_bytes
    sizes = [file.stat().st_size for name in edit.BUNDLED for file in edit.path(name).iterdir()]
    assert sum(sizes) <= 1_500_000


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.weekly), DOCUMENTS])
@pytest.mark.parametrize(
    ("source", "bound"), [("ngram", 0.45), pytest.param("draft", 0.6, marks=pytest.mark.weekly)]
)
def test_drafts_save_more_than_half_of_the_steps(
    large: LoadedModel,
    small: LoadedModel,
    asked: list[Asked],
    plain: list[list[int]],
    rows: int,
    source: str,
    bound: float,
) -> None:
    """And change no token. What counts for rows that decode together is the longest of them."""
    drafter = (
        open_draft_model(small, runner_of(small.model), large)
        if source == "draft"
        else Ngrams(large.info.vocab_size)
    )
    engine = MlxEngine(runner_of(large.model), large.info, engine_options({}), speculator=by_worth(drafter))
    tokens = 0
    for together in [asked] if rows == DOCUMENTS else [[one] for one in asked[:3]]:
        assert engine.insert([one.request for one in together]) == []
        run = finish(engine)
        for one in together:
            assert run.ids(one.request.row) == plain[one.request.row]
        tokens += max(len(plain[one.request.row]) for one in together)
    assert engine.stats().steps <= bound * tokens


@pytest.mark.weekly
def test_a_small_model_learns_and_a_larger_one_starts_where_it_ends(tmp_path: Any) -> None:
    """The loss falls; the directories are those of mlx-lm; the command in them repeats the run."""
    lines: list[str] = []
    plan = Plan(steps=50, batch_tokens=512, lessons=2000, width=32, layers=1, inner_width=32, seed=5)
    outcome = train(plan, lines.append)
    assert float(lines[0].split("loss ")[1].split()[0]) < 6
    write(tmp_path / "small", outcome)
    pair: Any = mlx_lm.load(str(tmp_path / "small"))
    assert isinstance(mlx_lm.generate(pair[0], pair[1], "{", max_tokens=3), str)
    larger = replace(plan, layers=3, inner_width=96, steps=0)
    write(tmp_path / "large", train(larger, lines.append, tmp_path / "small"))
    ids = mx.array([[1, 2, 3, 4, 5]])
    grown: Any = mlx_lm.load(str(tmp_path / "large"))
    assert mx.allclose(pair[0](ids), grown[0](ids), atol=0.05)
    command = json.loads((tmp_path / "large" / "training.json").read_text())["command"]
    assert command.endswith(
        "--start SMALLER --steps 0 --batch-tokens 512 --lessons 2000 --width 32 --inner-width 96 --seed 5"
    )


def test_a_document_and_its_patch_make_the_answer() -> None:
    """As RFC 7396 has it; the change is one of one field, and no held-out word is in the train split."""
    train_words: set[str] = set()
    for split in ("train", "held_out"):
        for one in islice(edits(split, 3), 50):
            document, patch = json.loads(one.text), json.loads(one.patch)
            assert json.loads(one.answer) == document | patch != document
            assert list(json.loads(one.answer)) == list(document)
            assert len(patch) == 1
            words = set(document)
            if split == "train":
                train_words |= words
            else:
                assert not words & train_words
