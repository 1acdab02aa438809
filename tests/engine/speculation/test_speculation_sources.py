"""Every source of drafts on every kind of model: no token changes, for rows alone and for many that come and go."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.models.families import MOE
from tests.support.constrained import PERSON, Pico
from tests.support.drafts import Erring, Self, speculator
from tests.support.engines import Run, finish, make_engine, step
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions

ROWS = int(os.environ.get("ZMQENGINE_TEST_DRAFT_ROWS", "12"))
TOKENS = int(os.environ.get("ZMQENGINE_TEST_DRAFT_TOKENS", "40"))
AT_ONCE = 32
# Both with penalties; the second of few words, which come again.
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3, logit_bias={5: 1.5}),
    Sampling(temperature=8.0, frequency_penalty=0.1, logit_bias=dict.fromkeys(range(10, 14), 100.0)),
)
KINDS = ("llama", "sliding", "mamba", "hybrid", "mixture")
SOURCES = ("set", "ngram", "draft", "prediction")


@pytest.fixture(scope="module")
def plain(models: dict[str, Any]) -> Callable[[str], tuple[Any, list[RowRequest], Run]]:
    """By kind: a model, requests, and what each of them makes alone in an engine that does not draft."""
    known: dict[str, tuple[Any, list[RowRequest], Run]] = {}

    def find(kind: str) -> tuple[Any, list[RowRequest], Run]:
        if kind not in known:
            model = build_model(MOE) if kind == "mixture" else models[kind]
            known[kind] = model, requests(), alone(make_engine(model), requests())
        return known[kind]

    return find


def requests() -> list[RowRequest]:
    draw = random.Random(1)
    return [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 2, 5, 20, 50, 100)))],
            TOKENS,
            sampling=SAMPLINGS[row % 3],
            seed=row,
        )
        for row in range(ROWS)
    ]


def alone(engine: Any, rows: list[RowRequest]) -> Run:
    run = Run()
    for request in rows:
        assert engine.insert([request]) == []
        finish(engine, run)
    return run


def together(engine: Any, rows: list[RowRequest]) -> Run:
    """Rows join as others end and between their steps; some are parked and come back."""
    run, draw = Run(), random.Random(2)
    for request in rows:
        while engine.stats().rows_decoding + engine.stats().rows_prefilling >= AT_ONCE:
            step(engine, run)
        assert engine.insert([request]) == []
        for _ in range(draw.randrange(4)):
            step(engine, run)
        parked = draw.randrange(request.row + 1)
        if draw.random() < 0.25 and not run.ended(parked):
            engine.park(parked)
            assert engine.insert([replace(rows[parked], emitted=run.ids(parked))]) == []
    return finish(engine, run)


def drafting(kind: str, model: Any, rows: list[RowRequest], wanted: Run) -> Any:
    outputs = {(tuple(row.prompt), seed_key(row.seed)): wanted.ids(row.row) for row in rows}
    sources: dict[str, Callable[[], Any]] = {
        "set": lambda: Erring(outputs),
        "ngram": lambda: Ngrams(VOCAB_SIZE),
        "draft": lambda: Self(model),
        "prediction": Predictions,
    }
    return make_engine(model, speculator=speculator(sources[kind]()), rows_max=AT_ONCE)


def differing(rows: list[RowRequest], run: Run, wanted: Run) -> list[int]:
    assert run.failures == []
    return [row.row for row in rows if run.ids(row.row) != wanted.ids(row.row)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_changes_no_token(plain: Any, kind: str, source: str) -> None:
    """Greedy rows and seeded ones with penalties. Where caches cannot go back there is no draft at all."""
    model, rows, wanted = plain(kind)
    goes_back = kind != "mamba"
    if source == "draft" and not goes_back:
        pytest.skip("such a model drafts for nobody: it is refused when it is opened")
    if source == "prediction":
        # Right in parts: some of it is missing, some of it is something else.
        rows = [
            replace(row, prediction=[*ids[: TOKENS // 4], 7, 7, *ids[TOKENS // 3 :]])
            for row in rows
            if (ids := wanted.ids(row.row))
        ]
    for way in (alone, together):
        run = way(drafting(source, model, rows, wanted), rows)
        assert differing(rows, run, wanted) == []
        proposed, accepted = (sum(getattr(d, n) for d in run.drafts) for n in ("proposed", "accepted"))
        print(
            f"{kind}, {source}, {way.__name__}: {len(rows)} rows x {TOKENS} tokens, "
            f"{proposed} drafted, {accepted} accepted, 0 rows differ"
        )
        assert (proposed > 0) == goes_back
        # What the hybrid model writes hardly repeats itself.
        assert (accepted > 0) == goes_back or (kind, source) == ("hybrid", "ngram")
        assert proposed > accepted or not goes_back


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_a_grammar_forces_changes_no_token() -> None:
    """On the bundled model; every third row is free."""
    pico = Pico()
    schema = pico.grammar("json_schema", json.dumps(PERSON))
    late = pico.grammar("choice", choices=["yes", "no"], after=pico.text.encode(" was").ids)
    rows = [
        pico.row(row, (schema, late, None)[row % 3], sampling=SAMPLINGS[row // 3 % 2], max_tokens=TOKENS)
        for row in range(ROWS)
    ]
    wanted = alone(pico.engine(), rows)
    for way in (alone, together):
        run = way(pico.engine(speculator=speculator(ForcedRuns()), rows_max=AT_ONCE), rows)
        assert differing(rows, run, wanted) == []
        forced = sum(draft.accepted for draft in run.drafts)
        print(f"grammar, {way.__name__}: {len(rows)} rows of at most {TOKENS} tokens, {forced} accepted")
        assert forced > ROWS
