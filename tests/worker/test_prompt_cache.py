"""Whose prompts are whose, how much of them is kept, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from msgspec import structs

from tests.worker.harness import FrontEnd, Harness
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeFault
from zmqengine.engine.fake.fake_tokenizer import fake_tokenizer_json
from zmqengine.engine.interface import RowDivergence
from zmqengine.worker.scheduler.memory_ledger import WORKSPACE_SHARE
from zmqengine.worker.telemetry.divergences import Divergences

Make = Callable[..., Harness]
KIB = 1000
ENGINE = FakeEngineConfig(prompt_cache_bytes=1 << 30, kv_bytes_token=KIB)
PROMPT = [7] * 50


def cached(front_end: FrontEnd, request: str, **fields: object) -> int:
    front_end.accepted(request, PROMPT, max_tokens=1, **fields)
    (end,) = front_end.wait_for_end(request)
    return end.cached_tokens


@pytest.mark.parametrize(
    ("default", "asked", "expected"),
    [
        ("shared", None, 49),
        ("session", None, 0),
        ("key", None, 0),
        ("session", "shared", 49),
        ("shared", "session", 0),
        ("shared", "key", 0),
    ],
)
def test_a_prompt_is_shared_with_whom_it_may_be(make_harness: Make, default, asked, expected) -> None:
    """By default as configured; without keys everybody's key is their session. One's own is always found."""
    harness = make_harness(ENGINE, cache_scope=default)
    first, second = harness.front_end(), harness.front_end()
    fields = {} if asked is None else {"cache_scope": asked}
    assert cached(first, "a", **fields) == 0
    assert cached(first, "b", **fields) == 49
    assert cached(second, "a", **fields) == expected


@pytest.mark.parametrize(("scope", "expected"), [("session", 0), ("key", 0), ("shared", 49)])
def test_a_salt_parts_the_prompts_of_one_session(make_harness: Make, scope: str, expected: int) -> None:
    """A front-end keeps its own callers apart; what is shared has no parts."""
    front_end = make_harness(ENGINE).front_end()
    assert cached(front_end, "a", cache_scope=scope, cache_salt="first") == 0
    assert cached(front_end, "b", cache_scope=scope, cache_salt="other") == expected
    assert cached(front_end, "c", cache_scope=scope, cache_salt="first") == 49


def test_a_session_that_says_hello_again_has_its_prompts(make_harness: Make) -> None:
    """The scope is its secret's, so another connection of the same front-end finds them."""
    harness = make_harness(ENGINE, cache_scope="session")
    first = harness.front_end()
    assert cached(first, "a") == 0
    again = harness.front_end(secret=first.secret)
    assert cached(again, "b") == 49


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", 49),
        ("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", 0),
    ],
)
def test_what_is_cached_outlives_a_step_that_took_too_long(
    make_harness: Make, text: str, expected: int
) -> None:
    """Not one that found no memory, which cached prompts hold."""
    message = f"[METAL] Command buffer execution failed: {text}"
    fault = FakeFault(place="next", action="raise", index=200, message=message)
    harness = make_harness(structs.replace(ENGINE, faults=(fault,)))
    front_end = harness.front_end()
    assert cached(front_end, "a") == 0
    front_end.accepted("long", [3] * 10, max_tokens=400)
    front_end.wait_for_end("long")
    assert harness.actor.counters.engine_failures == 1
    assert cached(front_end, "b") == expected


def test_a_pinned_prompt_outlives_others(make_harness: Make) -> None:
    """They come and go in what is left."""
    harness = make_harness(ENGINE, prompt_cache_bytes=200 * KIB)
    front_end = harness.front_end()
    assert cached(front_end, "pinned", pin=True) == 0
    for number in range(1, 12):
        front_end.accepted(f"r{number}", [100 + number] * 60)
        front_end.wait_for_end(f"r{number}")
    assert cached(front_end, "again") == 49


@pytest.mark.parametrize(("options", "expected"), [({}, 0.5), ({"prompt_cache_share": 0.25}, 0.25)])
def test_prompts_get_a_share_of_what_weights_leave(make_harness: Make, options, expected) -> None:
    """And what rows need is theirs first."""
    harness = make_harness(ENGINE, memory_limit_bytes=1_000_000, **options)
    front_end = harness.front_end()
    harness.pass_()
    left = 1_000_000 * (1 - WORKSPACE_SHARE)
    ledger = harness.actor.scheduler.memory
    assert ledger.numbers(harness.engine.memory())["prompt_cache_bytes_max"] == int(left * expected)
    front_end.accepted("long", [3] * 10, max_tokens=600)
    harness.run_until(
        lambda: len(harness.actor.scheduler.running) == 1 and ledger.reserved_bytes > 0.6 * left
    )
    assert ledger.numbers(harness.engine.memory())["prompt_cache_bytes_max"] <= left - ledger.reserved_bytes


class RoomyEngine(FakeEngine):
    """An engine whose batch has allocated memory for rows to come."""

    empty_bytes = 300_000

    def trim(self, empty_bytes_max: int) -> int:
        return self.empty_bytes


def test_prompts_do_not_get_what_is_allocated_for_rows_to_come(make_harness: Make) -> None:
    """Room that rows left empty in a batch is taken, though no reservation counts it."""
    harness = make_harness(RoomyEngine(ENGINE), memory_limit_bytes=1_000_000, prompt_cache_share=1.0)
    harness.front_end().accepted("r", [3] * 10, max_tokens=600)
    harness.pass_()
    ledger = harness.actor.scheduler.memory
    assert ledger.reserved_bytes > 0
    assert ledger.prompt_cache_bytes == ledger.kv_bytes_max - ledger.reserved_bytes - RoomyEngine.empty_bytes


@pytest.mark.parametrize("with_text", [False, True])
def test_where_a_prompt_went_on_differently_is_told(caplog, with_text) -> None:
    """In tokens; what was said there only if the operator asked for it."""
    caplog.set_level(logging.INFO)
    divergences = Divergences(fake_tokenizer_json(1000) if with_text else None)
    divergences.note(RowDivergence(1, 15_812, 16_040, [10, 11], [12, 13]), None)
    (record,) = caplog.records
    assert "15,812 of 16,040 tokens" in record.message
    assert (getattr(record, "kept", "") != "") == with_text
    assert (getattr(record, "kept", "") != getattr(record, "came", "")) == with_text
