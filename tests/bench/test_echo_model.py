"""The model of `bench speculation` says again what it was told, and drafts save it most of its steps."""

from __future__ import annotations

import random

import pytest

from tests.support.drafts import by_worth
from tests.support.engines import finish
from zmqengine.bench import echo_model
from zmqengine.engine.drafts.ngrams import Ngrams
from zmqengine.engine.engine_options import EngineOptions
from zmqengine.engine.interface import ModelInfo, RowRequest
from zmqengine.engine.mlx_engine import MlxEngine

WORDS = 80


@pytest.mark.parametrize("drafts", [False, True])
def test_documents_are_said_again_with_their_marked_words_changed(drafts):
    """Word for word; with n-grams in less than half as many steps as there are tokens."""
    model = echo_model.build(WORDS, hidden=192, layers=1)
    info = ModelInfo("echo", echo_model.VOCAB_SIZE, 2048, frozenset(), 0)
    draw = random.Random(1)
    texts = [echo_model.document(draw, WORDS) for _ in range(4)]
    drafting = by_worth(Ngrams(info.vocab_size)) if drafts else None
    engine = MlxEngine(model, info, EngineOptions(prompt_cache_bytes=0), speculation=drafting)
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
    assert steps <= 0.45 * tokens if drafts else steps >= tokens
