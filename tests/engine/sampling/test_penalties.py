"""Bias and penalties change logits as their definitions say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engines import Run, finish, logits_after, make_engine, step
from zmqengine.engine.interface import RowRequest, Sampling

PROMPT = [5, 6, 7, 6]
COUNT = 20


def changed(logits: np.ndarray, output: list[int], sampling: Sampling) -> np.ndarray:
    """The definitions, token by token."""
    logits = logits.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in set(PROMPT) | set(output):
        rule = np.divide if logits[token] > 0 else np.multiply
        logits[token] = rule(logits[token], sampling.repetition_penalty)
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return logits


CASES = [
    Sampling(repetition_penalty=1.8),
    Sampling(repetition_penalty=0.5),
    Sampling(presence_penalty=2.0),
    Sampling(frequency_penalty=1.5),
    Sampling(frequency_penalty=-1.5, presence_penalty=-2.0),
    Sampling(logit_bias={11: 100.0}),
    Sampling(
        logit_bias={3: 4.5, 11: -100.0}, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.7
    ),
]


@pytest.mark.parametrize("sampling", CASES)
def test_greedy_output_is_that_of_a_plain_reference(model, sampling):
    """Each token is the likeliest after the model's logits were changed by hand."""
    engine = make_engine(model)
    engine.insert([RowRequest(0, PROMPT, COUNT, sampling=sampling, logprobs=0)])
    run = finish(engine)
    output: list[int] = []
    for token in run.tokens[0]:
        logits = changed(logits_after(model, PROMPT + output), output, sampling)
        assert logits[token.token] == pytest.approx(logits.max(), abs=1e-3)
        total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(logits[token.token] - total, abs=2e-3)
        output.append(token.token)


def test_rows_with_and_without_penalties_do_not_touch_each_other(model):
    """Rows join and leave in every order; each stream is what it is alone."""
    cases = [*CASES, Sampling(), Sampling(temperature=1.0, presence_penalty=1.0), Sampling(temperature=1.0)]
    wanted = []
    for number, sampling in enumerate(cases):
        alone = make_engine(model)
        alone.insert([RowRequest(number, PROMPT, 6 + 3 * number % 11, sampling=sampling, seed=number)])
        wanted.append(finish(alone).ids(number))
    engine = make_engine(model)
    run = Run()
    for number, sampling in enumerate(cases):
        engine.insert([RowRequest(number, PROMPT, 6 + 3 * number % 11, sampling=sampling, seed=number)])
        step(engine, run)
        step(engine, run)
    finish(engine, run)
    assert [run.ids(number) for number in range(len(cases))] == wanted


@pytest.mark.parametrize("sampling", CASES)
def test_emitted_tokens_count_as_output(model, sampling):
    """A resumed row is penalised for what it said before the crash."""
    engine = make_engine(model)
    engine.insert([RowRequest(0, PROMPT, COUNT, sampling=sampling)])
    whole = finish(engine).ids(0)
    engine = make_engine(model)
    engine.insert([RowRequest(0, PROMPT, COUNT, sampling=sampling, emitted=whole[:8])])
    assert finish(engine).ids(0) == whole[8:]


def test_a_forbidden_token_is_never_chosen(model):
    """A bias of -100 on the likeliest token removes it."""
    engine = make_engine(model)
    engine.insert([RowRequest(0, PROMPT, COUNT)])
    usual = set(finish(engine).ids(0))
    engine.insert([RowRequest(0, PROMPT, COUNT, sampling=Sampling(logit_bias=dict.fromkeys(usual, -100.0)))])
    assert not usual & set(finish(engine).ids(0))
