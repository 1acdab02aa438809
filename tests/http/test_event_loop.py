"""Tokenising never holds up the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.serving import Front, chat, get, post, serving
from zmqengine.engine.fake_engine import FakeEngineConfig
from zmqengine_client.testing import FakeWorker
from zmqengine_http import HttpConfig, logs, prompts

TOKENS = 40_000
SLOWER_S = 1.2


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    config = FakeEngineConfig(context_tokens=100_000, prefill_chunk=50_000)
    with FakeWorker(config, process=True) as worker, serving(HttpConfig(workers=(worker.address,))) as front:
        yield front


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What is logged during the test."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = kept.append  # type: ignore[method-assign, assignment]
    logs.logger.addHandler(handler)
    logs.logger.setLevel(logging.INFO)
    yield kept
    logs.logger.removeHandler(handler)


class Gaps:
    """How long the event loop of a front-end goes without a turn."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.done = False

    async def watch(self) -> None:
        """Run on the loop until `done`."""
        before = time.monotonic()
        while not self.done:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - before)
            before = now


def test_a_chat_of_40_000_tokens_does_not_stop_the_loop(
    front: Front, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-mlx #479 review: 30 s of tokenising a 40,000-token chat stopped everyone. Here it takes a second longer."""
    real = prompts.encode_chat

    def slow(*arguments: Any) -> prompts.ChatPrompt:
        time.sleep(SLOWER_S)
        return real(*arguments)

    monkeypatch.setattr("zmqengine_http.chat.encode_chat", slow)
    gaps = Gaps()
    watching = asyncio.run_coroutine_threadsafe(gaps.watch(), front.loop)
    text = "secret " * (TOKENS // 7 + 1)
    usage = post(front, "/v1/chat/completions", chat(text, max_tokens=1)).json["usage"]
    gaps.done = True
    watching.result(30)
    assert usage["prompt_tokens"] > TOKENS
    assert 0 < gaps.longest_s < SLOWER_S / 2
    (line,) = [record.__dict__["fields"] for record in records if record.getMessage() == "slow tokenizing"]
    assert line["seconds"] >= SLOWER_S
    assert not any("secret" in str(record.__dict__) for record in records)


def test_others_are_served_while_a_tokenizer_takes_its_time(
    front: Front, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the log tells id, tokens and seconds when it takes over one.

    vllm-mlx #593: with work on the event loop health, admission and cancel stalled.
    """
    inside, go_on = threading.Event(), threading.Event()
    real = prompts.encode_chat

    def slow(*arguments: Any) -> prompts.ChatPrompt:
        inside.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr("zmqengine_http.chat.encode_chat", slow)
    monkeypatch.setattr(prompts, "SLOW_S", 0.0)
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(
            post,
            front,
            "/v1/chat/completions",
            chat("long " * 1000, max_tokens=1),
            **{"x-request-id": "long-one"},
        )
        assert inside.wait(30)
        assert get(front, "/health").status == 200
        assert post(front, "/v1/completions", {"prompt": [1], "max_tokens": 5}).status == 200
        go_on.set()
        tokens = long.result(30).json["usage"]["prompt_tokens"]
    (line,) = [record.__dict__["fields"] for record in records if record.getMessage() == "slow tokenizing"]
    assert (line["id"], line["tokens"]) == ("long-one", tokens)
    assert line["seconds"] > 0
