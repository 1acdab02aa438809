"""A warm-up does what traffic will need, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engines import make_engine, runner_of
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.load import warm_up


def test_an_engine_is_as_new_after_it(model):
    """No rows, no prompts and no counts; the pace is that of this machine, and a request gets the same tokens."""
    engine, fresh = make_engine(model, rows_max=4), make_engine(model, rows_max=4)
    told: list[float] = []
    engine.warm_up(600.0, told.append)
    assert told[-1] == 1
    assert told == sorted(told)
    stats = engine.stats()
    assert (stats.rows_decoding, stats.rows_prefilling, stats.prompt_tokens, stats.generated_tokens) == (
        0,
        0,
        0,
        0,
    )
    assert stats.prompt_cache_entries == 0
    outputs = []
    for one in (engine, fresh):
        assert not one.insert([RowRequest(row=1, prompt=[5, 6, 7], max_tokens=6)])
        tokens: list[int] = []
        while len(tokens) < 6:
            tokens += [token.token for token in one.next().tokens]
        outputs.append(tokens)
        one.close()
    assert outputs[0] == outputs[1]


def test_it_ends_when_time_is_up(model):
    """It is bounded in time, and what it was in the middle of is gone."""
    engine = make_engine(model, rows_max=4)
    engine.warm_up(0.0, lambda fraction: None)
    assert engine.stats().rows_decoding == engine.stats().rows_prefilling == 0
    engine.close()


@pytest.mark.parametrize(("rows_max", "context"), [(1, 64), (32, 4096), (48, 130)])
def test_its_rounds_fit(rows_max, context):
    """Every kind of sampling, and no prompt past the context."""
    rounds = list(warm_up.plan(rows_max, 2048, context))
    assert all(1 <= tokens <= context for one in rounds for tokens in one.prompts)
    assert max(len(one.prompts) for one in rounds) <= max(rows_max, 1)
    assert all(any(one.sampling == kind for one in rounds) for kind in warm_up.KINDS)
    assert all(one.tokens_of(row) <= warm_up._TOKENS_MAX for one in rounds for row in range(len(one.prompts)))


@pytest.mark.parametrize("kind", ["auto", "mlx-lm"])
def test_it_steps_every_number_of_rows_that_a_step_is_padded_to(model, monkeypatch, kind):
    """Else a kernel is compiled, or a shape traced, while people wait."""
    runner = runner_of(model, kind)
    engine = make_engine(runner, rows_max=40)
    forward, numbers = runner.forward, set()

    def watched(pieces, *rest):
        if all(piece.samples and piece.count == 1 for piece in pieces):
            numbers.add(len(pieces))
        return forward(pieces, *rest)

    monkeypatch.setattr(runner, "forward", watched)
    engine.warm_up(600.0, lambda fraction: None)
    engine.close()
    assert numbers >= {*range(1, 9), *map(few_sizes, range(9, 41))}


def test_what_is_met_once_is_no_measurement(model, monkeypatch):
    """A reading that was quick is repeated, and the faster one counts: the other did much for the first time."""
    engine = make_engine(model, rows_max=1, context_tokens=300)
    read: list[int] = []
    inner = engine.insert

    def watched(rows: Sequence[RowRequest]) -> Any:
        read.extend(len(row.prompt) for row in rows)
        return inner(rows)

    monkeypatch.setattr(engine, "insert", watched)
    monkeypatch.setattr(warm_up, "_SHORT_S", 60.0)
    measured = warm_up.warm_up(engine, 64, 600.0)
    engine.close()
    assert read.count(129) == 2
    assert measured is not None
    assert measured.prompt_tokens_a_second > 0 < measured.step_s
