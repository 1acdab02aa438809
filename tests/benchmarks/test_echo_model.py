"""The models of `bench speculation` say what is known beforehand, and drafts save them most of their steps."""

from __future__ import annotations

import random

import pytest

from benchmarks.speculation import echo_model
from benchmarks.speculation.erring_source import ErringSource
from benchmarks.speculation.foreseeable import make_foreseeable
from tests.support.drafts import by_worth
from tests.support.engines import finish, make_engine, runner_of
from tests.support.models import build_model
from zmqengine.engine.interface import ModelInfo, RowRequest
from zmqengine.engine.load.loader import evaluate
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.step.mlx_engine import MlxEngine

WORDS = 80


@pytest.mark.parametrize("drafts", [False, True])
def test_documents_are_said_again_with_their_marked_words_changed(drafts):
    """Word for word; with n-grams in less than half as many steps as there are tokens."""
    model = echo_model.build(WORDS, hidden=192, layers=1)
    info = ModelInfo("echo", echo_model.VOCAB_SIZE, 2048, frozenset(), 0)
    draw = random.Random(1)
    texts = [echo_model.document(draw, WORDS) for _ in range(4)]
    drafting = by_worth(Ngrams(info.vocab_size)) if drafts else None
    engine = MlxEngine(runner_of(model), info, EngineOptions(prompt_cache_bytes=0), speculator=drafting)
    tokens = 0
    for row, text in enumerate(texts):
        wanted = echo_model.answer(text)
        engine.insert(
            [RowRequest(row, echo_model.prompt(text), 2 * WORDS, stop_token_ids=frozenset({echo_model.END}))]
        )
        run = finish(engine)
        assert run.ids(row) == wanted
        tokens += len(wanted)
    steps = engine.stats().steps
    assert steps <= 0.4 * tokens if drafts else steps >= tokens


@pytest.mark.slow
def test_a_draft_model_of_a_fifth_of_the_size_saves_most_steps():
    """It is another model with other weights, which repeats what it reads as well."""
    model, small = echo_model.build(WORDS), echo_model.build(WORDS, hidden=192, layers=1, seed=1)
    assert 4 * evaluate(small) < evaluate(model)
    info = ModelInfo("echo", echo_model.VOCAB_SIZE, 2048, frozenset(), 0)
    source = DraftModel(runner_of(small), 0, words=info.vocab_size)
    engine = MlxEngine(
        runner_of(model), info, EngineOptions(prompt_cache_bytes=0), speculator=by_worth(source)
    )
    draw = random.Random(2)
    texts = [echo_model.document(draw, WORDS) for _ in range(2)]
    engine.insert([RowRequest(row, echo_model.prompt(text), WORDS) for row, text in enumerate(texts)])
    run = finish(engine)
    for row, text in enumerate(texts):
        assert run.ids(row) == echo_model.answer(text)[:WORDS]
    assert engine.stats().steps <= 0.6 * WORDS


def test_a_draft_of_a_set_quality_is_right_as_often_as_that():
    """Seven of ten tokens, so four tenths of drafts of four, in any model that was made to be foreseen."""
    model = build_model()
    make_foreseeable(model)
    prompts = [[5, 1], [9], [7, 8, 3]]
    asked = [RowRequest(row, prompt, 200) for row, prompt in enumerate(prompts)]
    # The words that this model reads are the words it says.
    known = {tuple(prompt): [prompt[-1]] * 200 for prompt in prompts}
    engine = make_engine(model, speculator=by_worth(ErringSource(known, 0.7, 4)))
    engine.insert(asked)
    run = finish(engine)
    assert [run.ids(row) for row in range(3)] == list(known.values())
    proposed, accepted = (
        sum(numbers) for numbers in zip(*((d.proposed, d.accepted) for d in run.drafts), strict=True)
    )
    assert 0.35 < accepted / proposed < 0.55
    assert engine.stats().steps < 100
