"""Sampled tokens follow the distribution that was asked for, and belong to their row alone."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import Run, finish, logits_after, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import PLAIN_DRAW
from zmqengine.engine.seeds import seed_key, uniform

WARM = Sampling(temperature=0.8, top_p=0.9, top_k=40)
COUNT = 24


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What the interface's docstring says, by sorting, in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        ranked = weights[order]
        before = np.cumsum(ranked) - ranked
        weights[order[before >= sampling.top_p * ranked.sum()]] = 0
    if sampling.min_p:
        weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def plan(settings_: list[Sampling], vocab_size: int):
    rows = [Row(RowRequest(i, [1], 9, sampling=s, seed=i), vocab_size, 2048) for i, s in enumerate(settings_)]
    return rows, PLAIN_DRAW.plan(rows, vocab_size)


def histogram(logits: np.ndarray, sampling: Sampling, draws: int) -> np.ndarray:
    """How often each token is drawn."""
    rows, how = plan([sampling] * 64, len(logits))
    batch = mx.array(np.tile(logits, (64, 1)).astype(np.float32))
    counts = np.zeros(len(logits))
    for _ in range(draws // 64):
        counts += np.bincount(np.array(how.draw(batch)[0]), minlength=len(logits))
        for row in rows:
            row.sampled += 1
    return counts / counts.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
    ],
)
def test_drawn_tokens_follow_the_reference_distribution(sampling):
    """6,400 draws: only tokens of the support, each about as often as it should be."""
    logits = np.random.default_rng(1).normal(0, 2, 60)
    wanted = distribution(logits, sampling)
    drawn = histogram(logits, sampling, 6400)
    assert not drawn[wanted == 0].any()
    # Six standard errors: it fails by chance once in 10 million runs, and the seeds are fixed.
    assert (np.abs(drawn - wanted) < 6 * np.sqrt(wanted * (1 - wanted) / 6400) + 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.sampled_from([3, 50, 3000]),
    spread=st.sampled_from([0.05, 1.0, 8.0]),
    settings_=st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
            top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1.0]),
            top_k=st.sampled_from([0, 1, 2, 17, 1 << 20]),
            min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_mixed_batch_draws_from_each_rows_own_support(seed, vocab_size, spread, settings_):
    """Greedy rows take the likeliest; the others a token that top_k, top_p and min_p leave, whoever is beside."""
    logits = np.random.default_rng(seed).normal(0, spread, (len(settings_), vocab_size)).astype(np.float32)
    _, how = plan(settings_, vocab_size)
    tokens = np.array(how.draw(mx.array(logits))[0])
    for row, sampling, token in zip(logits, settings_, tokens, strict=True):
        if not sampling.temperature:
            assert token == row.argmax()
            continue
        # A hair more than the exact nucleus: the threshold is found to 1 part in 10,000.
        wider = Sampling(
            temperature=sampling.temperature,
            top_p=min(1.0, sampling.top_p + 1e-4),
            top_k=sampling.top_k,
            min_p=sampling.min_p * 0.9999,
        )
        assert distribution(row, wider)[token] > 0


def test_a_seeded_stream_is_the_same_alone_in_a_batch_and_after_a_resume(model):
    """A key comes from (seed, output index): not from the batch, the order of arrival or the row's past life."""
    request = RowRequest(1, [5, 6, 7], COUNT, sampling=WARM, seed=42)
    alone = make_engine(model)
    alone.insert([request])
    wanted = finish(alone).ids(1)

    crowded = make_engine(model)
    crowded.insert(
        [RowRequest(7, [9] * 30, 60, sampling=Sampling(temperature=2.0), seed=42), RowRequest(8, [3], 60)]
    )
    run = Run()
    for _ in range(5):
        step(crowded, run)
    crowded.insert([RowRequest(row, [5, 6, 7], COUNT, sampling=WARM, seed=row) for row in (20, 21)])
    crowded.insert([request])
    assert finish(crowded, run).ids(1) == wanted

    resumed = make_engine(model)
    resumed.insert([RowRequest(1, [5, 6, 7], COUNT, sampling=WARM, seed=42, emitted=wanted[:10])])
    assert finish(resumed).ids(1) == wanted[10:]


def test_different_seeds_give_different_streams(model):
    """smg servicer: a seed belongs to its row."""
    engine = make_engine(model)
    hot = Sampling(temperature=1.5)
    engine.insert([RowRequest(row, [5, 6, 7], COUNT, sampling=hot, seed=row // 2) for row in range(8)])
    run = finish(engine)
    streams = [tuple(run.ids(row)) for row in range(8)]
    assert len(set(streams)) == 4
    assert streams[0::2] == streams[1::2]


def test_drawing_does_not_touch_the_global_generator(model):
    """smg servicer: seeds were global."""
    mx.random.seed(1)
    wanted = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(1)
    engine = make_engine(model)
    engine.insert([RowRequest(0, [5], COUNT, sampling=WARM, seed=3)])
    finish(engine)
    assert mx.random.uniform(shape=(4,)).tolist() == wanted


def test_uniform_numbers_are_even_and_exact_in_float32():
    """100,000 numbers of neighbouring seeds fill [0, 1) evenly and are not correlated."""
    numbers = np.array([uniform(seed_key(seed), index) for seed in range(100) for index in range(1000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert (numbers.astype(np.float32) == numbers).all()
    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 170
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1000], numbers[1000:])[0, 1]) < 0.02


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_those_of_the_model(model, top):
    """The chosen token's, before temperature, and the best ones sorted; rows that do not ask get none."""
    engine = make_engine(model)
    engine.insert(
        [
            RowRequest(0, [5, 6], 8, sampling=Sampling(temperature=1.5), seed=1, logprobs=top),
            RowRequest(1, [7], 8),
            RowRequest(2, [8, 9], 8, logprobs=3),
        ]
    )
    run = finish(engine)
    assert all(token.logprobs is None for token in run.tokens[1])
    text = [5, 6]
    for token in run.tokens[0]:
        logits = logits_after(model, text).astype(np.float64)
        logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(logprobs[token.token], abs=1e-3)
        best = np.sort(logprobs)[::-1][:top]
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(list(best), abs=1e-3)
        assert [logprobs[id_] for id_, _ in token.logprobs.top] == pytest.approx(list(best), abs=1e-3)
        text.append(token.token)
    for token in run.tokens[2]:
        assert token.logprobs is not None
        assert len(token.logprobs.top) == 3
        assert token.logprobs.top[0][0] == token.token


def test_more_alternatives_than_words_gives_all_words(model):
    """N is bounded by the vocabulary."""
    engine = make_engine(model)
    engine.insert([RowRequest(0, [5], 1, logprobs=VOCAB_SIZE + 10)])
    logprobs = finish(engine).tokens[0][0].logprobs
    assert logprobs is not None
    assert sorted(id_ for id_, _ in logprobs.top) == list(range(VOCAB_SIZE))


def test_widened_parameters_are_those_of_each_row_so_many_times():
    """No parameter is left behind when a row has several tokens in a step."""
    several = [WARM, Sampling(temperature=1.5, min_p=0.2), Sampling(temperature=0.3, top_k=7, top_p=0.5)]
    _, narrow = plan(several, VOCAB_SIZE)
    _, repeated = plan([each for each in several for _ in range(3)], VOCAB_SIZE)
    assert narrow.parameters is not None
    assert repeated.parameters is not None
    wide = narrow.parameters.widened(3)
    names = {field.name for field in dataclasses.fields(wide)} - {"rows", "index"}
    assert len(names) >= 5
    for name in names:
        assert np.array_equal(getattr(wide, name), getattr(repeated.parameters, name)), name


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    """The protocol allows every float above 0; one whose inverse is no float32 must not draw token 0 for ever."""
    logits = np.array([[0.5, 3.0, 2.9, -1.0]], np.float32)
    _, how = plan([Sampling(temperature=temperature)], 4)
    assert how.draw(mx.array(logits))[0].tolist() == [1]
