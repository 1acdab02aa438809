"""A model's own head drafts for rows that come and go, as it would draft for each of them alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.engines import Run, alone, finish, step
from tests.support.heads import expected_drafts, head_module, headed_engine, right_model_and_head
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.head_drafts import HeadDrafts


class Compared(HeadDrafts):
    """A head whose drafts are compared with those that follow from all tokens at once."""

    model: Any = None
    head: Any = None
    seen: list[tuple[Sequence[int], Sequence[int]]]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts = super().draft(rows, counts)
        if self.model is not None:
            for row, tokens in zip(rows, drafts, strict=True):
                assert tokens, "a row in decode has a draft"
                self.seen.append((tokens, expected_drafts(self.model, self.head, row, len(tokens))))
        return drafts


def compared_engine(model: Any, head: Any, **options: Any) -> Any:
    """An engine whose head's drafts are compared."""
    engine = headed_engine(model, head, drafts=Compared, **options)
    source = engine._speculator.model
    source.model, source.head, source.seen = model, head, []
    return engine


def check(engine: Any, least: int) -> None:
    """Compare at least so many drafts."""
    seen = engine._speculator.model.seen
    assert len(seen) >= least
    assert [drafts for drafts, _ in seen] == [expected for _, expected in seen]


def requests(rows: int, tokens: int) -> list[RowRequest]:
    draw = random.Random(3)
    lengths = (1, 2, 5, 20, 50, 100)
    return [
        RowRequest(row, [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice(lengths))], tokens)
        for row in range(rows)
    ]


SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5 mixture", "qwen3_next")]


@pytest.mark.parametrize("name", ["qwen3_5", *SELDOM, "glm4_moe", "mimo"])
def test_drafts_are_those_that_follow_from_all_tokens_at_once(name):
    """Whatever the head knows of a row came in chunks, verify blocks, beside others, or with a parked row."""
    model = build_model(ARCHITECTURES[name])
    head = head_module(model)
    rows = requests(6, 16)
    wanted = [alone(model, row) for row in rows]
    engine = compared_engine(model, head, widths=(1, 3, 4), prefill_chunk=32, prefill_chunk_idle=32)
    run, draw = Run(), random.Random(2)
    for request in rows:
        assert engine.insert([request]) == []
        for _ in range(draw.randrange(4)):
            step(engine, run)
        if request.row in (2, 4):
            engine.park(request.row - 1)
            emitted = run.ids(request.row - 1)
            if not run.ended(request.row - 1):
                engine.insert([replace(rows[request.row - 1], emitted=emitted)])
    finish(engine, run)
    assert run.failures == []
    assert [run.ids(row.row) for row in rows] == wanted
    check(engine, least=20)


@pytest.mark.slow
def test_a_prefix_of_the_cache_brings_the_state_of_the_head():
    """A conversation goes on from a checkpoint in the middle of a block, and from one at the end of an output."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    engine = compared_engine(model, head_module(model), widths=(3,))
    draw = random.Random(4)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(150)]
    run = Run()
    for turn in range(3):
        request = RowRequest(turn, prompt, 12)
        assert engine.insert([request]) == []
        finish(engine, run)
        assert run.cached(turn) > (0, 100, 160)[turn] - 1
        assert run.ids(turn) == alone(model, request)
        prompt = [*prompt, *run.ids(turn), *(draw.randrange(VOCAB_SIZE) for _ in range(20))]
    check(engine, least=6)


@pytest.mark.slow
def test_a_row_that_outgrows_its_slot_takes_what_the_head_keeps_along():
    """A slot of 512 tokens is left in the middle of a draft."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    engine = compared_engine(model, head_module(model), widths=(4,))
    draw = random.Random(5)
    request = RowRequest(0, [draw.randrange(VOCAB_SIZE) for _ in range(500)], 24)
    assert engine.insert([request]) == []
    run = finish(engine)
    assert run.ids(0) == alone(model, request)
    check(engine, least=6)


def test_a_row_with_three_positions_is_drafted_for_as_one_with_one_where_they_are_equal():
    """Frame, row and column of a text are one number."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    engine = compared_engine(model, head_module(model), widths=(3,))
    decoder = engine._runner.decoder
    mixer = decoder.weights.layers[-1].mixer
    decoder.axes = tuple(pair % 3 for pair in range(mixer.rotation.dims // 2))
    request = RowRequest(0, [7, 5, 3, 9, 1, 2, 8], 12)
    assert engine.insert([request]) == []
    engine._rows[0].positions = np.tile(np.arange(7), (3, 1))
    run = finish(engine)
    assert run.ids(0) == alone(model, request)
    check(engine, least=3)


@pytest.mark.parametrize(
    ("temperature", "least"), [(0.0, 0.85), pytest.param(0.7, 0.5, marks=pytest.mark.slow)]
)
def test_a_head_that_is_right_is_accepted_as_often_beside_others_as_alone(temperature, least):
    """Rows that are sampled are drafted for with their own random numbers: the likeliest tokens would be wrong."""
    model, head = right_model_and_head()
    draw = random.Random(6)
    rows = [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(30 + 3 * row)],
            24,
            seed=row,
            sampling=Sampling(temperature=temperature),
        )
        for row in range(8)
    ]

    def share(engine: Any, batches: Sequence[Sequence[RowRequest]]) -> float:
        run = Run()
        for batch in batches:
            assert engine.insert(batch) == []
            finish(engine, run)
        assert [run.ids(row.row) for row in rows] == [alone(model, row) for row in rows]
        assert {draft.source for draft in run.drafts} == {"head"}
        return sum(draft.accepted for draft in run.drafts) / sum(draft.proposed for draft in run.drafts)

    one_by_one = share(headed_engine(model, head, widths=(4,)), [[row] for row in rows])
    together = share(headed_engine(model, head, widths=(4,)), [rows])
    assert one_by_one > least
    assert together == pytest.approx(one_by_one, abs=0.05)
