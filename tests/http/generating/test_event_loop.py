"""Tokenising never holds up the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.front import Front, chat, get, post, serving
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.prompt import prompts
from zmqengine_http.serving import logs

TOKENS = 40_000


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


def test_a_chat_of_40_000_tokens_does_not_stop_the_loop(
    front: Front, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-mlx #479 review: 30 s of tokenising a 40,000-token chat stopped everyone. Here the loop has its turns."""
    real = prompts.encode_chat

    async def turn() -> None:
        """One turn of the front-end's event loop."""

    def meanwhile(*arguments: Any) -> Any:
        asyncio.run_coroutine_threadsafe(turn(), front.loop).result(60)
        encoded = real(*arguments)
        asyncio.run_coroutine_threadsafe(turn(), front.loop).result(60)
        return encoded

    monkeypatch.setattr("zmqengine_http.generating.chat.encode_chat", meanwhile)
    monkeypatch.setattr(prompts, "SLOW_S", 0.0)
    text = "secret " * (TOKENS // 7 + 1)
    usage = post(front, "/v1/chat/completions", chat(text, max_tokens=1)).json["usage"]
    assert usage["prompt_tokens"] > TOKENS
    (line,) = [record.__dict__["fields"] for record in records if record.getMessage() == "slow tokenizing"]
    assert line["tokens"] == usage["prompt_tokens"]
    assert not any("secret" in str(record.__dict__) for record in records)


def test_others_are_served_while_a_tokenizer_takes_its_time(
    front: Front, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the log tells id, tokens and seconds when it takes over one.

    vllm-mlx #593: with work on the event loop health, admission and cancel stalled.
    """
    inside, go_on = threading.Event(), threading.Event()
    real = prompts.encode_chat

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr("zmqengine_http.generating.chat.encode_chat", slow)
    monkeypatch.setattr(prompts, "SLOW_S", 0.0)
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(
            post,
            front,
            "/v1/chat/completions",
            chat("long " * 1000, max_tokens=1),
            **{"x-request-id": "long-one"},
        )
        assert inside.wait(60)
        assert get(front, "/health").status == 200
        assert post(front, "/v1/completions", {"prompt": [1], "max_tokens": 5}).status == 200
        go_on.set()
        tokens = long.result(60).json["usage"]["prompt_tokens"]
    (line,) = [record.__dict__["fields"] for record in records if record.getMessage() == "slow tokenizing"]
    assert (line["id"], line["tokens"]) == ("long-one", tokens)
    assert line["seconds"] > 0
