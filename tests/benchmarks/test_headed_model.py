"""Pico in the shape of Qwen3.5 says what pico says, and its trained head changes no token of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.speculation.headed.model import build, head_tensors, requests
from benchmarks.speculation.headed.train import Plan, train
from tests.support.constrained import HOT, PERSON, Pico
from tests.support.drafts import Widths
from tests.support.engines import Run, finish, step
from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.draft_head import DraftHead
from zmqengine.engine.models.families import read_head, read_weights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.speculation.head_drafts import HeadDrafts


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


@pytest.fixture(scope="module")
def decoder() -> DecoderModel:
    return DecoderModel(read_weights(build(1)), PlainOps())


@pytest.fixture(scope="module")
def head(decoder: DecoderModel) -> DraftHead:
    model = build(1)
    return DraftHead(read_head(model, head_tensors(model)), decoder)


def plain_engine(pico: Pico, decoder: DecoderModel) -> Any:
    return pico.engine(SlotRunner(decoder, 2048))


def drafting_engine(pico: Pico, decoder: DecoderModel, head: DraftHead, *widths: int) -> Any:
    runner = SlotRunner(decoder, 2048, head)
    speculator = Widths([], widths)
    speculator.model = HeadDrafts(runner, pico.loaded.info.vocab_size)
    return pico.engine(runner, speculator=speculator)


def test_it_says_what_pico_says(pico: Pico) -> None:
    """At any width."""
    tokens = mx.array([pico.text.encode("Once upon a time, there was a little fox.").ids])
    wanted = pico.loaded.model(tokens)
    for wider in (1, 2):
        assert mx.allclose(build(wider)(tokens), wanted, atol=1e-3).item()


def rows_of_all_kinds(pico: Pico) -> list[RowRequest]:
    """Greedy, sampled, penalised, with grammars, bounds on reasoning, stops, biases and log-probabilities."""
    encode = pico.text.encode
    grammar = pico.grammar("json_schema", json.dumps(PERSON))
    late = pico.grammar("regex", "[0-9]+", after=encode(" was").ids)
    closer = encode("</think>").ids
    bound = thinking_bound(
        9, closer, encode("<think>").ids, vocabulary=pico.tokens, opened=True, then=encode("\n").ids
    )
    penalised = Sampling(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1)
    text = "Once upon a time"
    return [
        pico.row(0, None, text, max_tokens=40, logprobs=2),
        pico.row(1, None, text, max_tokens=40, sampling=HOT),
        pico.row(2, None, text, max_tokens=40, sampling=penalised, logprobs=1),
        pico.row(3, grammar, max_tokens=40),
        pico.row(4, late, text, max_tokens=40, sampling=HOT, logprobs=2),
        pico.row(5, None, text, max_tokens=40, thinking=bound),
        pico.row(6, grammar, max_tokens=50, sampling=penalised, thinking=bound),
        pico.row(7, None, text, stop_token_ids=frozenset(encode(".").ids), sampling=Sampling(min_tokens=20)),
        pico.row(8, None, text, max_tokens=40, sampling=Sampling(logit_bias={encode(".").ids[0]: 4.0})),
    ]


@pytest.mark.weekly
def test_the_head_changes_no_token_of_rows_of_all_kinds(
    pico: Pico, decoder: DecoderModel, head: DraftHead
) -> None:
    """Which join one by one; one is parked and comes back."""
    rows = rows_of_all_kinds(pico)
    wanted = Run()
    plain = plain_engine(pico, decoder)
    for row in rows:
        assert plain.insert([row]) == []
        finish(plain, wanted)
    engine, run, draw = drafting_engine(pico, decoder, head, 1, 2, 4), Run(), random.Random(1)
    for row in rows:
        assert engine.insert([row]) == []
        for _ in range(draw.randrange(1, 3)):
            step(engine, run)
        if row.row == 5:
            engine.park(2)
            assert not run.ended(2)
            engine.insert([replace(rows[2], emitted=run.ids(2))])
    finish(engine, run)
    assert run.failures == []
    for row in rows:
        assert run.ids(row.row) == wanted.ids(row.row), row.row
        assert run.finish(row.row) == wanted.finish(row.row)
        for ours, theirs in zip(run.tokens[row.row], wanted.tokens[row.row], strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None) == (row.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-3)
    assert sum(draft.accepted for draft in run.drafts) > len(rows)


@pytest.mark.weekly
def test_the_trained_head_is_accepted_as_often_beside_others_as_alone(
    pico: Pico, decoder: DecoderModel, head: DraftHead
) -> None:
    """In stories and answers that neither model nor head was trained on."""
    rows = requests(8, 5, 40, Sampling())

    def share(batches: list[list[RowRequest]]) -> float:
        engine, run = drafting_engine(pico, decoder, head, 3), Run()
        for batch in batches:
            assert engine.insert(batch) == []
            finish(engine, run)
        return sum(draft.accepted for draft in run.drafts) / sum(draft.proposed for draft in run.drafts)

    one_by_one, together = share([[row] for row in rows]), share([rows])
    assert one_by_one > 0.5
    assert together == pytest.approx(one_by_one, abs=0.05)


@pytest.mark.weekly
def test_a_head_learns() -> None:
    """Its tensors are those that are read."""
    lines: list[str] = []
    trained = train(Plan(steps=50, batch_tokens=256, depth=2), lines.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]
    assert losses[-1] < 6
    assert head_tensors(build(1)).keys() == dict(tree_flatten(trained.parameters())).keys()
