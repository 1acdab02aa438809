"""A model's own head drafts for rows that come and go, as it would draft for each of them alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.drafts import accepted_share, come_and_go, converse, rows_of_unlike_lengths, sampled_rows
from tests.support.engines import alone, finish
from tests.support.heads import expected_drafts, head_module, headed_engine, right_model_and_head
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.interface import RowRequest
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
    """Compare the drafts, of which there are `least` or more."""
    seen = engine._speculator.model.seen
    assert len(seen) >= least
    assert [drafts for drafts, _ in seen] == [expected for _, expected in seen]


SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5 mixture", "qwen3_next")]


@pytest.mark.parametrize("name", ["qwen3_5", *SELDOM, "glm4_moe", "mimo"])
def test_drafts_are_those_that_follow_from_all_tokens_at_once(name):
    """Whatever the head knows of a row came in chunks, verify blocks, beside others, or with a parked row."""
    model = build_model(ARCHITECTURES[name])
    head = head_module(model)
    rows = rows_of_unlike_lengths(6, 16)
    wanted = [alone(model, row) for row in rows]
    engine = compared_engine(model, head, widths=(1, 3, 4), prefill_chunk=32, prefill_chunk_idle=32)
    run = come_and_go(engine, rows)
    assert [run.ids(row.row) for row in rows] == wanted
    check(engine, least=20)


@pytest.mark.slow
def test_a_prefix_of_the_cache_brings_the_state_of_the_head():
    """A conversation goes on from a checkpoint in the middle of a block, and from one at the end of an output."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    engine = compared_engine(model, head_module(model), widths=(3,))
    converse(engine, model, 150, 12, (-1, 99, 159))
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
    rows = sampled_rows(temperature)

    def share(batches):
        return accepted_share(headed_engine(model, head, widths=(4,)), model, batches)

    one_by_one = share([[row] for row in rows])
    assert one_by_one > least
    assert share([rows]) == pytest.approx(one_by_one, abs=0.05)
