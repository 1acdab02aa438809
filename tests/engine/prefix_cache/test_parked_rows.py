"""A parked row's caches and its token in flight go to the row that resumes it, and to no other of the same prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.engines import Run, alone, finish, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest, Sampling

PROMPT = [(number * 7) % VOCAB_SIZE for number in range(40)]
HOT = Sampling(temperature=8.0)
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"seed": 1, "sampling": HOT}, {"seed": 2, "sampling": HOT}),
    "sampling": ({"sampling": Sampling()}, {"sampling": Sampling(logit_bias={9: 100.0})}),
    # Random numbers go by the index of an output token.
    "end of the prompt": (
        {"prompt": PROMPT[:-2], "emitted": PROMPT[-2:], "sampling": HOT},
        {"prompt": PROMPT, "sampling": HOT},
    ),
}


def in_flight(engine: Any, rows: list[RowRequest]) -> None:
    """Step until each row has its first token in flight and none was reported, and park all."""
    run = Run()
    assert engine.insert(rows) == []
    while engine.stats().rows_prefilling:
        step(engine, run)
    assert run.tokens == {}
    for row in rows:
        assert engine.park(row.row) > 0


@pytest.mark.parametrize("name", PAIRS)
def test_a_token_in_flight_is_reported_for_its_own_row(model: Any, name: str) -> None:
    """Two rows that differ in one wish alone are parked, and come back in the other order."""
    same: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8}
    rows = [RowRequest(number, **(same | wishes)) for number, wishes in enumerate(PAIRS[name])]
    wanted = [alone(model, row) for row in rows]
    assert wanted[0][0] != wanted[1][0]
    # A CPU reports a first token in the step that made it.
    engine = make_engine(model, device=Device(is_gpu=True))
    in_flight(engine, rows)
    assert engine.insert([replace(row, row=10 + row.row) for row in reversed(rows)]) == []
    run = finish(engine)
    assert [run.ids(10 + row.row) for row in rows] == wanted


def test_a_parked_row_is_not_resumed_from_another_scope(model: Any) -> None:
    """Another tenant's request with the same tokens computes its prompt, and is told of no cached token."""
    theirs = RowRequest(0, PROMPT, 8, cache_scope="theirs")
    # A CPU reports a first token in the step that made it.
    engine = make_engine(model, device=Device(is_gpu=True))
    in_flight(engine, [theirs])
    engine.insert([replace(theirs, row=1, cache_scope="ours")])
    run = finish(engine)
    assert run.cached(1) == 0
    engine.insert([replace(theirs, row=2)])
    finish(engine, run)
    assert run.cached(2) > 0
    assert run.ids(1) == run.ids(2) == alone(model, theirs)
