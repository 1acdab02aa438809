"""A worker's memory limit may change while it serves: another worker has come, or gone."""

from __future__ import annotations

from tests.worker.harness import Harness
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest

KIB = 1000
ENGINE = FakeEngineConfig(kv_bytes_token=KIB, context_tokens=4096, prompt_cache_bytes=1 << 30)
SLACK = 10 / 9
"""A tenth of the limit is kept for workspace."""


def limit(tokens: int) -> int:
    """A limit under which rows may hold so many tokens."""
    return int(tokens * KIB * SLACK) + KIB


def test_a_lower_limit_comes_into_force_as_promises_end(make_harness) -> None:
    """Who was let in still ends, with the same tokens; who comes later is held against the lower limit."""
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=limit(1000))
    front_end = harness.front_end()
    front_end.accepted("large", [1] * 10, max_tokens=600, seed=1)
    front_end.accepted("small", [2] * 10, max_tokens=50, seed=2)
    harness.passes(5)
    ledger = harness.actor.scheduler.memory
    harness.actor.scheduler.resize(limit(300), harness.actor.lifecycle.live())
    harness.pass_()
    assert limit(300) < ledger.limit_bytes < limit(1000)
    assert ledger.kv_bytes_max >= 610 * KIB
    assert front_end.rejected("late", [3] * 10, max_tokens=700).code == "never_fits"
    front_end.wait_for_end("large", "small")
    for request, prompt, count, seed in (("large", [1] * 10, 600, 1), ("small", [2] * 10, 50, 2)):
        row = RowRequest(0, prompt, count, seed=seed)
        assert front_end.tokens[request] == expected_tokens(row, ENGINE)
    harness.actor.scheduler.resize(limit(300), harness.actor.lifecycle.live())
    harness.pass_()
    assert abs(ledger.limit_bytes - limit(300)) <= 2
    assert front_end.rejected("later", [3] * 10, max_tokens=400).code == "never_fits"
    memory = harness.engine.memory()
    assert memory.active <= ledger.limit_bytes


def test_a_lower_limit_waits_for_all_promises_together(make_harness) -> None:
    """Many small requests hold more than the largest of them."""
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=limit(1000))
    front_end = harness.front_end()
    names = [f"r{index}" for index in range(8)]
    for index, name in enumerate(names):
        front_end.accepted(name, [index + 1] * 10, max_tokens=100)
    ledger = harness.actor.scheduler.memory
    harness.run_until(lambda: ledger.reserved_bytes > 800 * KIB)
    harness.actor.scheduler.resize(limit(200), harness.actor.lifecycle.live())
    harness.pass_()
    assert ledger.kv_bytes_max >= ledger.reserved_bytes > 800 * KIB
    front_end.wait_for_end(*names)


def test_a_higher_limit_lets_more_in(make_harness) -> None:
    """What never fitted does."""
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=limit(300))
    front_end = harness.front_end()
    assert front_end.rejected("early", [3] * 10, max_tokens=400).code == "never_fits"
    harness.actor.scheduler.resize(limit(1000), harness.actor.lifecycle.live())
    front_end.accepted("late", [3] * 10, max_tokens=400)
    front_end.wait_for_end("late")


def test_a_lower_limit_does_not_wait_for_requests_that_named_none(make_harness) -> None:
    """They end with `length` where memory ends now, with the same tokens until there."""
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=limit(1000), growth_tokens=16)
    front_end = harness.front_end()
    front_end.accepted("open", [1] * 10, max_tokens=None, seed=1)
    harness.passes(20)
    harness.actor.scheduler.resize(limit(300), harness.actor.lifecycle.live())
    harness.pass_()
    assert abs(harness.actor.scheduler.memory.limit_bytes - limit(300)) <= 2
    (end,) = front_end.wait_for_end("open")
    made = front_end.tokens["open"]
    assert end.finish == "length"
    assert 285 <= len(made) + 10 <= 302
    assert made == expected_tokens(RowRequest(0, [1] * 10, len(made), seed=1), ENGINE)


def test_an_abort_that_meets_a_row_at_its_new_end_is_the_one_answer(make_harness) -> None:
    """The row may not grow, and would be ended in the pass that reads the abort. What it was promised it gets."""
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=limit(1000), growth_tokens=16)
    front_end = harness.front_end()
    front_end.accepted("open", [1] * 10, max_tokens=None)
    harness.passes(20)
    (request,) = harness.actor.lifecycle.live()
    harness.actor.scheduler.resize(limit(20), harness.actor.lifecycle.live())
    assert request.tokens_max == request.reserved_tokens > request.tokens_held
    harness.run_until(lambda: request.tokens_held >= request.tokens_max)
    front_end.abort("open")
    (end,) = front_end.wait_for_end("open")
    assert end.finish == "abort"
    assert harness.actor.counters.engine_failures == 0
