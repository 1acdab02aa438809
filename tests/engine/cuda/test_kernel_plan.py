"""What a kernel for CUDA is told of each row, and what the host learns: tried with plain arithmetic in its place."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.cuda import draw_kernel
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.sampling import draw as sampling
from zmqengine.engine.seeds import uniform

pytestmark = pytest.mark.cuda_emulated

SETTINGS = (
    Sampling(),
    *sampling.SAMPLED,
    Sampling(temperature=0.7, top_p=0.9, presence_penalty=0.3, logit_bias={5: 1.5}),
)


def in_place_of_the_kernel(
    logits: mx.array,
    plan: mx.array,
    drawn: int,
    width: int = 1,
) -> draw_kernel.TokenArrays:
    """As `draw_kernel.choose`, by MLX's own calls."""
    numbers = np.array(plan).reshape(-1, 7)
    numbers = np.repeat(numbers, width, axis=0)
    floats = numbers.view(np.float32)
    assert len(numbers) == logits.shape[0]
    keys = [int(low) & 0xFFFFFFFF | (int(high) & 0xFFFFFFFF) << 32 for low, high in numbers[:, :2]]
    ahead = [drawn + place % width for place in range(len(numbers))]
    likeliest = mx.argmax(logits, axis=-1)
    places = [place for place in range(len(numbers)) if floats[place, 3] > 0]
    if places:
        words = logits.shape[1]
        columns = {at: mx.array(floats[places, at])[:, None] for at in (3, 5, 6)}
        limits = numbers[places, 4]
        top_k_max = max((int(k) for k in limits if k < words), default=0)
        how = sampling.DrawParameters(
            rows=[],
            index=None,
            inverse_temperature=columns[3],
            top_k=mx.array(limits)[:, None] if min(limits) < words else None,
            top_k_max=top_k_max,
            top_p=columns[5],
            every_top_p_has_top_k=False,
            min_p_floor=columns[6],
        )
        uniforms = [uniform(keys[place], int(numbers[place, 2]) + ahead[place]) for place in places]
        index = mx.array(places)
        likeliest[index] = sampling.draw(logits[index], how, mx.array(uniforms)[:, None])
    tokens = np.array(likeliest)
    found = np.take_along_axis(np.array(logits.astype(mx.float32)), tokens[:, None], axis=1)[:, 0]
    marked = tokens.astype(np.uint32) | np.where(np.isfinite(found), 0, 1 << 31).astype(np.uint32)
    told = [mx.array(np.resize(marked[at : at + 2], 2)) for at in range(0, len(marked), 2)]
    return draw_kernel.TokenArrays(likeliest, tuple(told))


@pytest.fixture
def kernel(monkeypatch):
    """Stands in for it; a place to change more."""
    monkeypatch.setattr(draw_kernel, "choose", in_place_of_the_kernel)
    return monkeypatch


def requests(count: int, tokens: int) -> list[RowRequest]:
    draw = random.Random(3)
    return [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 3, 20, 50)))],
            draw.randrange(tokens // 2, tokens + 1),
            sampling=SETTINGS[row % len(SETTINGS)],
            seed=2**64 - 1 - row,
            logprobs=2 if row % 4 == 0 else None,
        )
        for row in range(count)
    ]


@pytest.mark.parametrize("drafts", ["", "waiting"])
@pytest.mark.usefixtures("kernel")
def test_all_rows_make_the_same_tokens_by_a_plan_for_the_kernel(model, drafts):
    """Greedy and sampled ones, that come in turn, leave, are parked, and get on by several tokens a step."""
    rows = requests(10, 24)
    wanted = Run()
    engine = make_engine(model)
    engine.insert(rows)
    finish(engine, wanted)
    known = {(tuple(row.prompt), Row(row, VOCAB_SIZE, 2048).key): wanted.ids(row.row) for row in rows}
    engine = make_engine(
        model, speculator=speculator(Erring(known)) if drafts else None, draw=draw_kernel.KernelDraw()
    )
    run = Run()
    for place, request in enumerate(rows):
        assert engine.insert([request]) == []
        for _ in range(place % 3):
            step(engine, run)
        if place == 6 and not run.ended(5):
            engine.park(5)
            engine.insert([replace(rows[5], emitted=run.ids(5))])
    finish(engine, run)
    assert run.failures == []
    assert {row.row: run.ids(row.row) for row in rows} == {row.row: wanted.ids(row.row) for row in rows}
    assert all(
        (ours.logprobs is None) == (theirs.logprobs is None)
        for row in rows
        for ours, theirs in zip(run.tokens[row.row], wanted.tokens[row.row], strict=True)
    )
    assert bool(run.drafts) == bool(drafts)


def test_a_plan_is_made_once_for_rows_that_get_on_alike(kernel):
    """Nothing is made on the host in such steps but how many there were; rows that do not get a new one."""
    rows = [
        Row(RowRequest(row, [1], 99, sampling=SETTINGS[row], seed=row), VOCAB_SIZE, 2048) for row in range(3)
    ]
    plan = draw_kernel.KernelDraw().plan(rows, VOCAB_SIZE)
    made: list[int] = []
    columns = draw_kernel.columns
    kernel.setattr(draw_kernel, "columns", lambda given: made.append(len(given)) or columns(given))
    logits = mx.random.normal((3, VOCAB_SIZE), key=mx.random.key(1))
    seen = set()
    for _ in range(5):
        chosen: Any = plan.draw(logits)[0].tolist()
        seen.add(tuple(chosen))
        for row in rows:
            row.sampled += 1
    assert made == [3]
    assert len(seen) > 1
    rows[1].sampled += 2
    plan.draw(logits)
    assert made == [3, 3]


def test_a_logit_that_is_not_a_number_is_told(kernel):
    """The host learns of it with the token."""
    marked = [mx.array(np.array([5, 1 << 31 | 6], np.uint32)), mx.array(np.array([7, 99], np.uint32))]
    tokens, logits = draw_kernel.read(marked, 3)
    assert tokens == [5, 6, 7]
    assert [math.isnan(logit) for logit in logits] == [False, True, False]
