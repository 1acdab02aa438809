"""Rows of very different lengths do not pay for each other."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.support.engines import Run, alone, finish, greedy, make_engine, step
from zmqengine.engine.interface import RowRequest, Sampling, StepResult
from zmqengine.engine.kv import KVBatch
from zmqengine.engine.step.length_buckets import LengthBuckets

COUNT = 12
LENGTHS = (5, 400, 6, 390, 40, 1)


def prompt(length: int) -> list[int]:
    return [(7 * place + length) % 300 for place in range(length)]


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
@pytest.mark.parametrize("padding_bytes_max", [0, 30_000, 1 << 30])
def test_how_rows_are_sorted_does_not_change_their_tokens(models, shape, padding_bytes_max):
    """One batch, several, or one for each row: the same streams, penalties and seeds included."""
    engine = make_engine(models[shape], padding_bytes_max=padding_bytes_max, prompt_cache_bytes=0)
    hot = Sampling(temperature=1.0, presence_penalty=0.5)
    run = Run()
    for row, length in enumerate(LENGTHS):
        engine.insert([RowRequest(row, prompt(length), COUNT)])
        engine.insert([RowRequest(100 + row, prompt(length), COUNT, sampling=hot, seed=row + 1, logprobs=1)])
        step(engine, run)
    finish(engine, run)
    assert [run.ids(row) for row in range(len(LENGTHS))] == [
        greedy(models[shape], prompt(n), COUNT) for n in LENGTHS
    ]
    for row, length in enumerate(LENGTHS):
        # Seeds without a near tie: sums of a product differ in the last bit by its shape and the number of threads.
        request = RowRequest(0, prompt(length), COUNT, sampling=hot, seed=row + 1)
        assert run.ids(100 + row) == alone(models[shape], request)


def test_padding_stays_within_its_bound(model):
    """A row of 1,500 tokens beside 16 of 10: what is held is about what was projected, not 16 times as much."""
    held = {}
    for bound in (50_000, 1 << 30):
        engine = make_engine(model, padding_bytes_max=bound, prompt_cache_bytes=0)
        engine.insert([RowRequest(0, prompt(1500), COUNT)])
        engine.insert([RowRequest(row, prompt(10), COUNT) for row in range(1, 17)])
        run = Run()
        while len(run.tokens) < 17:
            step(engine, run)
        held[bound] = engine.memory().kv
        assert engine.stats().rows_decoding == 17
    projected = engine.project_bytes(1500 + COUNT) + 16 * engine.project_bytes(10 + COUNT)
    assert held[50_000] <= projected + 2 * 50_000
    assert held[1 << 30] > 3 * projected


def test_what_comes_at_once_shares_one_allowance(model):
    """Two rows that found much in the prompt cache, and two that found nothing: padding for one of these pairs."""
    token_bytes = make_engine(model).project_bytes(2) - make_engine(model).project_bytes(1)
    engine = make_engine(model, padding_bytes_max=100 * token_bytes)
    shared = prompt(1100)
    engine.insert([RowRequest(0, shared, 1)])
    finish(engine)
    rows = [[*shared, *prompt(10)], [*shared, *prompt(80)], prompt(11), prompt(81)]
    engine.insert([RowRequest(1 + row, tokens, COUNT) for row, tokens in enumerate(rows)])
    run = Run()
    while len(run.tokens) < 4:
        step(engine, run)
        assert engine.memory().padding <= 100 * token_bytes
    assert run.cached(2) == 1100


def test_a_long_row_can_be_removed_from_beside_short_ones(model):
    """Each batch ends by itself; nothing is left behind."""
    engine = make_engine(model, padding_bytes_max=0, prompt_cache_bytes=0)
    engine.insert([RowRequest(0, prompt(200), COUNT), RowRequest(1, prompt(20), COUNT)])
    run = Run()
    while len(run.tokens) < 2:
        step(engine, run)
    engine.remove([0])
    finish(engine, run)
    assert run.ids(1) == greedy(model, prompt(20), COUNT)
    engine.next()
    assert engine.memory().kv == 0


class Batch:
    """Holds rows and computes nothing."""

    caches: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.rows: list[object] = []
        self.kv = KVBatch()

    def join(self, rows, caches):
        self.rows += rows

    def begin(self, result, may_speculate):
        self.may_speculate = may_speculate()

    @property
    def idle(self):
        return not self.rows


def test_a_group_leaves_room_for_the_padding_that_the_next_one_has_already():
    """Two groups that come at once: one of them may use up the allowance only where the other needs none of it."""

    def rows(*lengths):
        return [
            SimpleNamespace(computed_tokens=length, prefill_tokens=length + 1, matcher=None)
            for length in lengths
        ]

    buckets = LengthBuckets(Batch, lambda tokens: tokens, padding_bytes_max=100)  # type: ignore[arg-type]
    buckets.join([(rows(500), KVBatch())])
    buckets.join([(rows(440, 460), KVBatch()), (rows(10, 70), KVBatch())])
    assert buckets.padding_bytes == 20 + 60
    buckets.join([(rows(68), KVBatch())])
    assert (len(buckets), buckets.padding_bytes) == (3, 82)


def test_no_row_takes_the_room_of_all_later_ones():
    """Chats beside a long one: without shares the first take all padding, and there are 26 batches."""
    draw = random.Random(0)
    lengths = [3_300] + [round(draw.lognormvariate(math.log(600), 0.4)) for _ in range(63)]
    buckets = LengthBuckets(Batch, lambda tokens: tokens, padding_bytes_max=90_000)  # type: ignore[arg-type]
    for length in lengths:
        row: Any = SimpleNamespace(computed_tokens=length, prefill_tokens=length + 1, matcher=None)
        buckets.join([([row], KVBatch())])
    assert len(buckets) <= 8
    assert buckets.padding_bytes <= 90_000


def test_a_long_row_joins_the_others_where_there_is_room():
    """It pads all of them, which takes more than a quarter of the room: the next rows take less."""
    buckets = LengthBuckets(Batch, lambda tokens: tokens, padding_bytes_max=100_000)  # type: ignore[arg-type]
    for length in [1_000] * 20 + [3_000] + [1_000] * 10:
        row: Any = SimpleNamespace(computed_tokens=length, prefill_tokens=length + 1, matcher=None)
        buckets.join([([row], KVBatch())])
    assert (len(buckets), buckets.padding_bytes) == (1, 60_000)


def test_nobody_drafts_while_there_are_several_batches():
    """How long their steps take cannot be told apart, nor what drafts cost; with one, it is a matter of room."""

    def rows(*lengths):
        return [
            SimpleNamespace(computed_tokens=length, prefill_tokens=length + 1, matcher=None)
            for length in lengths
        ]

    made: list[Batch] = []

    def new_batch():
        made.append(Batch())
        return made[-1]

    buckets = LengthBuckets(new_batch, lambda tokens: tokens, padding_bytes_max=100)  # type: ignore[arg-type]
    buckets.join([(rows(500, 510), KVBatch())])
    buckets.step(StepResult(), model=None)
    assert [batch.may_speculate for batch in made] == [True]
    buckets.join([(rows(10), KVBatch())])
    buckets.step(StepResult(), model=None)
    assert [batch.may_speculate for batch in made] == [False, False]
    made[1].rows.clear()
    for _ in range(2):
        buckets.step(StepResult(), model=None)
    assert made[0].may_speculate
