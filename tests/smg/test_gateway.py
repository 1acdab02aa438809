"""The real gateway in front of two workers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")

from tests.smg.real_gateway import Fleet, Reply, fleet
from tests.support.workers import wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

pytestmark = pytest.mark.process

# Few of the words are single bytes, so most outputs are text that no cutting into chunks can change.
ENGINE = FakeEngineConfig(vocab_size=20_000, step_ms=10, eos_index=100)


@pytest.fixture(scope="module")
def site() -> Iterator[Fleet]:
    """The gateway; tests that end something put it back."""
    with fleet(ENGINE) as site:
        yield site


def name(user: int) -> str:
    """A prompt that begins like no other, so that routing by prefix spreads the users."""
    return hashlib.sha256(str(user).encode()).hexdigest()


def taken(site: Fleet) -> list[int]:
    """Requests accepted by each worker."""
    return site.requests_taken()


def test_seeds_streams_and_counts(site: Fleet) -> None:
    """The same seed gives the same text, streamed or not, whichever worker; another seed another."""
    whole = site.gateway.complete("Hello", max_tokens=20, seed=4)
    streamed = site.gateway.complete(
        "Hello", max_tokens=20, seed=4, stream=True, stream_options={"include_usage": True}
    )
    other = site.gateway.complete("Hello", max_tokens=20, seed=5)
    assert whole.text == streamed.text != other.text
    assert whole.json["choices"][0]["finish_reason"] == "length"
    usage = whole.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 20)
    assert streamed.events[-1]["usage"]["completion_tokens"] == 20


def test_chat_has_logprobs(site: Fleet) -> None:
    """One entry a token, with the most probable ones beside it."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 0}
    answer = site.gateway.ask("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert len(choice["logprobs"]["content"]) == 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])


def test_an_answer_without_a_limit_runs_to_its_end_token(site: Fleet) -> None:
    """No max_tokens: up to the model's end, and the end token is not in the text."""
    answer = site.gateway.ask("/v1/completions", {"prompt": "Go on", "seed": 0})
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert answer.json["usage"]["completion_tokens"] == 101
    assert "<end>" not in answer.text


def test_other_fronts_of_the_gateway(site: Fleet) -> None:
    """Responses and Anthropic's messages, made by the gateway out of the same."""
    responses = site.gateway.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 4})
    assert responses.status == 200, responses.body
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    messages = site.gateway.ask("/v1/messages", body)
    assert messages.status == 200, messages.body
    assert messages.json["usage"]["output_tokens"] == 4


def test_stop_texts_and_choices(site: Fleet) -> None:
    """The gateway refuses both to any MLX backend."""
    stopped = site.gateway.complete("Stop", max_tokens=30, stop=["word"])
    several = site.gateway.complete("Stop", n=2)
    assert (stopped.status, several.status) == (400, 400)
    assert b"stop sequences" in stopped.body
    assert b"n > 1" in several.body


def test_what_cannot_be_honoured_is_an_error(site: Fleet) -> None:
    """Never a silent answer: the user reads the name of the field."""
    too_long = site.gateway.complete("x", max_tokens=100_000)
    bias = site.gateway.complete("x", logit_bias={"90000": 1.0})
    json_body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
    constrained = site.gateway.ask("/v1/chat/completions", json_body)
    assert constrained.status in (400, 500)
    assert too_long.status in (400, 500)
    assert b"context" in too_long.body
    assert b"logit_bias" in bias.body


def test_the_same_prefix_goes_to_the_same_worker(site: Fleet) -> None:
    """Cache-aware routing by the gateway's own tree of prompts: conversations stay where their prompt is cached."""
    prefixes = [f"Conversation {number}. " + "All of us know this text. " * 20 for number in range(4)]
    for prefix in prefixes:
        before = taken(site)
        for turn in range(4):
            assert site.gateway.complete(prefix + f"Turn {turn}.").status == 200
        counted = sum(before) + 4
        wait_until(lambda n=counted: sum(taken(site)) >= n, "a worker has not counted them")  # type: ignore[misc]
        gained = [after - was for after, was in zip(taken(site), before, strict=True)]
        assert sorted(gained) == [0, 4], gained


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_sixty_four_users_and_a_worker_that_is_killed(site: Fleet, killed: int) -> None:
    """Its engine is killed under load and brought back by its supervisor: every answer is whole."""
    site.gateway.wait_ready()
    asked_for: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
    plain = {user: site.gateway.complete(name(user), seed=user, **asked_for).text for user in (0, 1)}
    worker = site.workers[killed]

    def ask(user: int) -> Reply:
        return site.gateway.complete(name(user), seed=user, stream=True, **asked_for)

    with worker.client() as client, ThreadPoolExecutor(64) as pool:
        client.wait_ready()
        pid = worker.engine_pid()
        asked = [pool.submit(ask, user) for user in range(64)]
        wait_until(lambda: client.status().numbers["running"] >= 4, "nothing runs on this worker")
        worker.kill_engine()
        wait_until(lambda: worker.engine_pid() != pid, "the supervisor brings nothing back")
        replies = [future.result(60) for future in asked]
    assert [reply.status for reply in replies] == [200] * 64
    for user, reply in enumerate(replies):
        assert reply.events[-1]["choices"][0]["finish_reason"] == "length", user
        assert user not in plain or reply.text == plain[user], user


@pytest.mark.slow
def test_a_gateway_that_is_restarted_finds_its_workers(site: Fleet) -> None:
    """Killed under load, started again: it registers both workers, and what the lost one asked for is gone."""
    killed = threading.Event()

    def ask(user: int) -> Any:
        # It refuses everything for a while after a worker has died, as one has in the test before.
        while not killed.wait(0.1):
            try:
                reply = site.gateway.complete(name(100 + user), max_tokens=3000, ignore_eos=True, stream=True)
            except (OSError, HTTPException) as error:
                return error
            if reply.status == 200:
                return reply
        return None

    site.gateway.wait_ready()

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, user) for user in range(8)]

        def running() -> int:
            total = 0
            for worker in site.workers:
                with worker.client() as client:
                    total += int(client.status().numbers["running"])
            return total

        # Those that the gateway has not handed on yet end with it: enough of them run to be missed.
        try:
            wait_until(lambda: running() >= 4, "too few requests run")
            site.gateway.restart()
        finally:
            killed.set()
        for future in asked:
            future.result(60)
        wait_until(lambda: running() == 0, "requests of a gateway that is gone run on")
    site.gateway.wait_ready()
    assert site.gateway.complete("Hello again").status == 200
