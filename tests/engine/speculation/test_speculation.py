"""Drafts change how fast tokens come, and never which."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.drafts import Erring, by_worth, speculator
from tests.support.engines import Run, finish, make_engine, runner_of, step
from tests.support.heads import head_module, headed_engine, right_model_and_head
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions

ROWS = int(os.environ.get("ZMQENGINE_TEST_DRAFT_ROWS", "10"))
TOKENS = int(os.environ.get("ZMQENGINE_TEST_DRAFT_TOKENS", "30"))
ROWS_MAX = max(32, ROWS)
SHORT_CHUNKS: dict[str, Any] = {"prefill_chunk": 32, "prefill_chunk_idle": 32}
HOT = Sampling(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 1.5},
)


def requests(rows: int = ROWS, tokens: int = TOKENS) -> list[RowRequest]:
    """Greedy and seeded rows with penalties, of many lengths; some want log-probabilities."""
    draw = random.Random(1)
    return [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 2, 5, 20, 50, 100)))],
            draw.randrange(tokens // 3, tokens + 1),
            sampling=HOT if row % 2 else Sampling(),
            seed=row,
            logprobs=2 if row % 3 == 0 else None,
        )
        for row in range(rows)
    ]


def alone(model, rows: list[RowRequest]) -> Run:
    """Each row in an engine of its own that does not draft."""
    run = Run()
    engine = make_engine(model)
    for request in rows:
        assert engine.insert([request]) == []
        finish(engine, run)
    return run


def outputs(rows: list[RowRequest], run: Run) -> dict[tuple[tuple[int, ...], int], list[int]]:
    return {(tuple(request.prompt), seed_key(request.seed)): run.ids(request.row) for request in rows}


def drafting(model, rows: list[RowRequest], wanted: Run, **options):
    """An engine whose drafts are right seven times out of ten, for four rows out of five."""
    drafter = speculator(Erring(outputs(rows, wanted)))
    return make_engine(model, speculator=drafter, rows_max=ROWS_MAX, **options)


def same(run: Run, wanted: Run, row: int) -> None:
    assert run.ids(row) == wanted.ids(row)
    assert run.finish(row) == wanted.finish(row)
    for ours, theirs in zip(run.tokens[row], wanted.tokens[row], strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-3)
            assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "lfm2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gemma3_text",
                "gemma4_text",
                "gpt_oss",
                "glm4_moe",
                "deepseek_v3",
                "qwen3_5",
                "qwen3_next",
            )
        ),
    ],
)
def test_rows_that_come_and_go_and_draft_make_the_tokens_that_they_make_alone(name):
    """Some are removed, some are parked and come back, most join while verify blocks are in flight."""
    model = build_model(ARCHITECTURES[name])
    rows = requests()
    wanted = alone(model, rows)
    engine = drafting(model, rows, wanted, **SHORT_CHUNKS)
    come_and_go(engine, rows, wanted, accepted_least=len(rows) + 1)


@pytest.mark.parametrize(
    ("is_right", "count", "tokens"),
    [
        (False, ROWS, TOKENS),
        (True, ROWS, TOKENS),
        pytest.param(True, 33, 60, marks=pytest.mark.slow),
        # As many steps again as all other tests of drafts.
        pytest.param(True, 64, 200, marks=pytest.mark.weekly),
    ],
)
def test_rows_that_come_and_go_and_draft_by_a_head_make_the_tokens_that_they_make_alone(
    is_right, count, tokens
):
    """Of a head with random weights nothing is accepted, of one that is mostly right any number of tokens."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    model, head = right_model_and_head() if is_right else (model, head_module(model))
    rows = requests(count, tokens)
    wanted = alone(model, rows)
    engine = headed_engine(model, head, widths=(1, 2, 3, 6), rows_max=max(ROWS_MAX, count), **SHORT_CHUNKS)
    run = come_and_go(engine, rows, wanted, accepted_least=len(rows) if is_right else 0)
    assert {draft.source for draft in run.drafts} == {"head"}


def come_and_go(engine, rows: list[RowRequest], wanted: Run, *, accepted_least: int) -> Run:
    """Some are removed, some are parked and come back, most join while verify blocks are in flight."""
    draw = random.Random(2)
    run, removed = Run(), set()
    for request in rows:
        assert engine.insert([request]) == []
        for _ in range(draw.randrange(4)):
            step(engine, run)
        if request.row % 5 == 4:
            victim = request.row - draw.randrange(4)
            engine.remove([victim])
            removed.add(victim)
        if request.row % 4 == 3:
            parked = request.row - 1
            engine.park(parked)
            emitted = run.ids(parked)
            if len(emitted) < (request.max_tokens or 0) and parked not in removed and not run.ended(parked):
                engine.insert([replace(rows[parked], emitted=emitted)])
    finish(engine, run)
    assert run.failures == []
    assert sum(draft.accepted for draft in run.drafts) >= accepted_least
    for request in rows:
        if request.row in removed:
            assert run.ids(request.row) == wanted.ids(request.row)[: len(run.ids(request.row))]
        else:
            same(run, wanted, request.row)
    return run


def test_windows_save_steps(model):
    """What is accepted is not made again: rows that know what comes take a third of the steps."""
    rows = [replace(request, max_tokens=40) for request in requests(8)]
    wanted = alone(model, rows)
    erring = Erring(outputs(rows, wanted), right=1.0, drafting=1.0)
    known = speculator(erring, widths=(5,))
    counts = []
    for engine in (make_engine(model), make_engine(model, speculator=known)):
        engine.insert(rows)
        finish(engine)
        counts.append(engine.stats().steps)
    assert counts[1] <= counts[0] / 3


def test_a_stop_token_and_the_end_of_the_output_may_stand_inside_a_window(model):
    """Nothing follows them, whatever else of the draft was right; the caches left behind are of what was said."""
    rows = requests(6)
    wanted = alone(model, rows)
    stops = {request.row: wanted.ids(request.row)[7] for request in rows}
    known = Erring(outputs(rows, wanted), right=1.0, drafting=1.0)
    engine = make_engine(model, speculator=speculator(known, widths=(6,)))
    engine.insert([replace(request, stop_token_ids=frozenset({stops[request.row]})) for request in rows])
    run = finish(engine)
    for request in rows:
        ids = wanted.ids(request.row)
        assert run.ids(request.row) == ids[: ids.index(stops[request.row]) + 1]
        assert run.finish(request.row) == "stop"
    for request in rows:
        longer = RowRequest(50 + request.row, [*request.prompt, *run.ids(request.row), 9, 9], 12)
        engine.insert([replace(longer, speculate=False)])
        finish(engine, run)
        assert run.ids(longer.row) == alone(model, [longer]).ids(longer.row)


def test_stop_tokens_are_out_of_a_window_up_to_min_tokens(model):
    """Each position by its own index: drafts of stop tokens are rejected before it, and end the output from it on."""
    rows = [replace(request, max_tokens=24) for request in requests(6)]
    drafts = alone(model, rows)
    rows = [
        replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, min_tokens=10),
            stop_token_ids=frozenset(drafts.ids(request.row)[4:20:3]),
        )
        for request in rows
    ]
    wanted = alone(model, rows)
    known = speculator(Erring(outputs(rows, drafts), 1.0, 0.5), Erring(outputs(rows, wanted), 0.9, 1.0))
    engine = make_engine(model, speculator=known)
    engine.insert(rows)
    run = finish(engine)
    assert sum(draft.accepted for draft in run.drafts) > len(rows)
    for request in rows:
        same(run, wanted, request.row)
        assert not request.stop_token_ids & set(run.ids(request.row)[:10])
    assert {run.finish(request.row) for request in rows} == {"stop", "length"}


def test_draft_tokens_behind_the_end_of_an_output_do_not_count_as_accepted(model):
    """Usage, metrics and the choice of widths go by accepted tokens: in no step are they more than the tokens made."""
    rows = [replace(request, max_tokens=20, sampling=HOT) for request in requests(8)]
    wanted = alone(model, rows)
    known = Erring(outputs(rows, wanted), right=1.0, drafting=1.0)
    engine = make_engine(model, speculator=speculator(known, widths=(6,)))
    ended_inside = 0
    for request in rows:
        stop = wanted.ids(request.row)[9]
        assert engine.insert([replace(request, stop_token_ids=frozenset({stop}))]) == []
        made: list[int] = []
        while engine.stats().rows_decoding + engine.stats().rows_prefilling:
            result = engine.next()
            made += [token.token for token in result.tokens]
            for draft in result.drafts:
                assert draft.accepted <= len(result.tokens)
                ended_inside += draft.proposed > draft.accepted
        assert made[-1] == stop
    assert ended_inside > 4


def test_rows_whose_caches_cannot_go_back_do_not_draft(models):
    """A state of mlx-lm's that was overwritten holds no way back: one token a step."""
    rows = requests(6)
    wanted = alone(models["mamba"], rows)
    engine = drafting(models["mamba"], rows, wanted)
    assert engine.step_tokens_max == 1
    engine.insert(rows)
    run = finish(engine)
    assert run.drafts == []
    for request in rows:
        same(run, wanted, request.row)


def test_a_row_may_opt_out(model):
    """It makes one token a step; its neighbours draft."""
    rows = requests(4)
    rows[1] = replace(rows[1], speculate=False)
    wanted = alone(model, rows)
    engine = drafting(model, rows, wanted)
    engine.insert(rows)
    run = finish(engine)
    assert {draft.row for draft in run.drafts} == {0, 2, 3}
    for request in rows:
        same(run, wanted, request.row)


def test_a_row_whose_logits_are_not_numbers_fails_alone_in_a_window(model):
    """Its neighbours go on, and its tokens before that stand."""
    rows = requests(5)
    wanted = alone(model, rows)
    engine = drafting(model, rows, wanted)
    engine.insert(rows)
    run = Run()
    while not run.drafts:
        step(engine, run)
    spoilt = engine._rows[2]
    for values in spoilt.cache.pool.values:
        values[spoilt.cache.index, :, spoilt.computed_tokens - 1] = float("nan")
    finish(engine, run)
    assert [failure.row for failure in run.failures] == [2]
    assert run.ids(2) == wanted.ids(2)[: len(run.ids(2))]
    for row in (0, 1, 3, 4):
        same(run, wanted, row)


def test_a_text_that_never_repeats_runs_one_step_ahead_as_without(model):
    """No match, no wait: as many steps, and no window."""
    rows = [replace(request, sampling=Sampling(temperature=5.0), max_tokens=30) for request in requests(6)]
    wanted = alone(model, rows)
    counts = []
    for engine in (make_engine(model), make_engine(model, speculator=speculator(Ngrams(VOCAB_SIZE)))):
        engine.insert(rows)
        run = finish(engine)
        counts.append(engine.stats().steps)
        assert run.drafts == []
        for request in rows:
            same(run, wanted, request.row)
    assert counts[0] == counts[1]


def test_a_prediction_is_followed_around_what_it_has_wrong(model):
    """It has a token too many, one too few and a wrong one, and saves most steps; a useless one saves none."""
    rows = [replace(request, max_tokens=60) for request in requests(4)]
    wanted = alone(model, rows)
    edited = []
    for request in rows:
        ids = wanted.ids(request.row)
        edited.append(replace(request, prediction=[*ids[:10], 7, *ids[10:25], *ids[26:40], 7, *ids[41:]]))
    edited[3] = replace(rows[3], prediction=[7] * 60)
    engine = make_engine(model, speculator=by_worth(Predictions()))
    for request in edited:
        engine.insert([request])
        run = finish(engine)
        same(run, wanted, request.row)
        if request.row < 3:
            assert {draft.source for draft in run.drafts} == {"prediction"}
            assert sum(draft.accepted for draft in run.drafts) >= 40
    assert engine.stats().steps <= 3 * 25 + 65


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_draft_model_changes_no_token(model, seed):
    """One that always agrees, which saves steps, and one that never does; rows join late and leave early."""
    rows = requests()
    wanted = alone(model, rows)
    drafting = build_model(LLAMA, seed)
    source = DraftModel(runner_of(drafting), 0, words=VOCAB_SIZE)
    drafter = speculator(source, widths=(4,))
    plain = make_engine(model, rows_max=ROWS_MAX)
    engine = make_engine(model, speculator=drafter, rows_max=ROWS_MAX)
    for each in (plain, engine):
        run = Run()
        for request in rows:
            each.insert([request])
            step(each, run)
        if each is engine:
            each.remove([5])
        finish(each, run)
    assert run.failures == []
    for request in rows:
        if request.row != 5:
            same(run, wanted, request.row)
    # It does not know of penalties, so rows that have some agree less.
    greedy = [draft for draft in run.drafts if draft.row % 2 == 0]
    proposed, accepted = (
        sum(numbers) for numbers in zip(*((d.proposed, d.accepted) for d in greedy), strict=True)
    )
    assert proposed > 5 * ROWS
    if seed == 0:
        assert accepted > 0.9 * proposed
        assert engine.stats().steps < 0.7 * plain.stats().steps
    else:
        assert accepted < 0.1 * proposed
    engine.reset()
    assert engine.memory().kv == 0
