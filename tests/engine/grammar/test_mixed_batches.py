"""Rows with a grammar beside rows without one, in one batch: nobody notices the others."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.constrained import HOT, PERSON, Pico, run_all
from tests.support.drafts import by_worth
from tests.support.engines import Run, finish, runner_of, step
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.step.step import Step


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


class Told:
    """A runner that notes when its forward pass is built."""

    def __init__(self, model: Any, events: list[str]) -> None:
        self._runner = runner_of(model)
        self._events = events

    def forward(self, *given: Any, **named: Any) -> Any:
        self._events.append("call")
        return self._runner.forward(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def noting(events: list[str], name: str, method: Any) -> Any:
    def noted(*given: Any) -> Any:
        events.append(name)
        return method(*given)

    return noted


def rows_of(pico: Pico, kinds: Sequence[bool], **fields: Any) -> list[RowRequest]:
    """Greedy and sampled, with and without penalties, of unlike lengths."""
    grammar = pico.grammar("json_schema", json.dumps(PERSON))
    late = pico.grammar("regex", "[0-9]+", after=pico.text.encode(" was").ids)
    samplings = [Sampling(), HOT, Sampling(temperature=0.7, frequency_penalty=0.5)]
    return [
        pico.row(
            place,
            (late if place % 4 == 3 else grammar) if held else None,
            "Tell me about Tom. " * (1 + place % 3),
            **{"sampling": samplings[place % 3], "max_tokens": 40, "logprobs": place % 2, **fields},
        )
        for place, held in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ([False] * 6, ["call", "land"]),
        ([True, False] * 3, ["call", "fill", "land"]),
        ([True] * 6, ["call", "fill", "land"]),
    ],
    ids=["free", "mixed", "constrained"],
)
def test_a_step_is_one_call_of_the_model_that_waits_for_nobody(
    pico: Pico, monkeypatch: pytest.MonkeyPatch, kinds: list[bool], wanted: list[str]
) -> None:
    """It is built before its own tokens are waited for, and before a mask is filled. On a CPU a step lands at once."""
    events: list[str] = []
    monkeypatch.setattr(Step, "land", noting(events, "land", Step.land))
    monkeypatch.setattr(MaskFiller, "fill_windows", noting(events, "fill", MaskFiller.fill_windows))
    engine, run = pico.engine(Told(pico.loaded.model, events)), Run()
    engine.insert(rows_of(pico, kinds, max_tokens=30))
    # On a CPU a first token is told before the next step is started.
    while min(len(run.ids(row)) for row in range(len(kinds))) < 2:
        step(engine, run)
    for _ in range(8):
        events.clear()
        result = engine.next()
        assert len(result.tokens) == len(kinds)
        assert events == wanted


@pytest.fixture(scope="module")
def alone(pico: Pico) -> tuple[list[RowRequest], dict[int, list[int]]]:
    """Rows of both kinds, and what each of them makes alone."""
    rows = rows_of(pico, [place % 2 == 0 or place % 4 == 3 for place in range(10)])
    assert {row.grammar is None for row in rows} == {False, True}
    return rows, {row.row: run_all(pico.engine(), [row]).ids(row.row) for row in rows}


@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafting"])
def test_rows_that_join_and_leave_change_nobodys_tokens(
    pico: Pico, alone: tuple[list[RowRequest], dict[int, list[int]]], drafting: bool
) -> None:
    """Rows of both kinds come and are removed at any step; all are as if they were alone."""
    rows, wanted = alone
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    words = pico.loaded.info.vocab_size
    engine = pico.engine(speculator=by_worth(ForcedRuns(), Ngrams(words)) if drafting else None)
    run, waiting, removed = Run(), chance.sample(rows, len(rows)), set()
    while waiting or len(run.tokens) < len(rows):
        if waiting and chance.random() < 0.6:
            assert engine.insert([waiting.pop()]) == []
        for row in rows:
            if run.tokens.get(row.row) and not run.ended(row.row) and chance.random() < 0.03:
                engine.remove([row.row])
                removed.add(row.row)
        step(engine, run)
    finish(engine, run)
    assert run.failures == []
    for row in rows:
        made = run.ids(row.row)
        length = len(made) if row.row in removed else None
        assert made == wanted[row.row][:length], f"seed {seed}, row {row.row}"


@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafting"])
def test_a_parser_that_fails_ends_its_own_row_alone(
    pico: Pico, alone: tuple[list[RowRequest], dict[int, list[int]]], drafting: bool
) -> None:
    """In a batch of both kinds, between two steps; the others are as if they were alone."""
    rows, wanted = alone[0][:4], alone[1]
    words = pico.loaded.info.vocab_size
    engine = pico.engine(speculator=by_worth(ForcedRuns(), Ngrams(words)) if drafting else None)
    run = Run()
    engine.insert(rows)
    while len(run.ids(0)) < 5:
        step(engine, run)
    matcher = engine._rows[0].matcher
    assert matcher is not None
    matcher.parser.consume_token(pico.eos[0])
    assert matcher.error
    finish(engine, run)
    assert [(failure.row, "constraint" in failure.message) for failure in run.failures] == [(0, True)]
    assert run.ids(0) == wanted[0][: len(run.ids(0))]
    for row in rows[1:]:
        assert run.ids(row.row) == wanted[row.row]
