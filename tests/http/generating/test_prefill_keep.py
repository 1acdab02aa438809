"""`prefill_keep` over HTTP: a share of the prompt is read, `usage` says how much, and who cannot do it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, post, serving
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

TEXT = "All that was said before. " * 8
ASKED = [{"role": "user", "content": TEXT}]
# Path, body, the usage in the answer, and the place of its number of tokens read.
APIS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "/v1/chat/completions": ({"messages": ASKED}, "max_tokens", "prompt_tokens", "prompt_tokens_details"),
    "/v1/completions": ({"prompt": TEXT}, "max_tokens", "prompt_tokens", "prompt_tokens_details"),
    "/v1/responses": ({"input": TEXT}, "max_output_tokens", "input_tokens", "input_tokens_details"),
    "/v1/messages": ({"model": "fake", "messages": ASKED}, "max_tokens", "input_tokens", ""),
}
every_api = pytest.mark.parametrize("path", APIS)


def _served(*, keeps: bool) -> Iterator[Front]:
    with (
        FakeWorker(FakeEngineConfig(keeps=keeps)) as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
    ):
        yield front


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """On a worker whose prompts may be read in part."""
    yield from _served(keeps=True)


@pytest.fixture(scope="module")
def front_without() -> Iterator[Front]:
    """On a worker without a draft model."""
    yield from _served(keeps=False)


@every_api
def test_usage_says_the_whole_prompt_and_what_was_read(front: Front, path: str) -> None:
    """`kept_tokens`, which is there for such a request alone; the answer is another one."""
    body, max_tokens, whole, details = APIS[path]
    body = {**body, max_tokens: 6}

    def usage_of(**fields: object) -> tuple[int, dict[str, Any], bytes]:
        reply = post(front, path, {**body, **fields})
        assert reply.status == 200, reply.body
        usage = reply.json["usage"]
        return usage[whole], usage[details] if details else usage, reply.body

    tokens, plain, _ = usage_of()
    assert "kept_tokens" not in plain
    in_part, kept, _ = usage_of(prefill_keep=0.3)
    assert in_part == tokens
    assert kept["kept_tokens"] == math.ceil(tokens * 0.3)
    assert "kept_tokens" not in usage_of(prefill_keep=None)[1]


def test_ollamas_options_have_it(front: Front) -> None:
    """As any field of the generation; the answer shows that it came through."""
    body = {"model": "fake", "messages": ASKED, "stream": False}

    def said(**options: object) -> str:
        reply = post(front, "/api/chat", {**body, "options": {"num_predict": 6, "seed": 1, **options}})
        assert reply.status == 200, reply.body
        return str(reply.json["message"]["content"])

    assert said() == said()
    assert said(prefill_keep=0.5) == said(prefill_keep=0.5) != said()


@every_api
def test_a_share_outside_its_range_is_refused_by_name(front: Front, path: str) -> None:
    """Nothing and everything included."""
    body, max_tokens, *_ = APIS[path]
    for wrong in (0, 1, -0.5, "half"):
        reply = post(front, path, {**body, max_tokens: 6, "prefill_keep": wrong})
        assert reply.status == 400
        assert "prefill_keep" in reply.json["error"]["message"]
    reply = post(front, path, {**body, max_tokens: 6, "prefill_keep": 0.5, "pin": True})
    assert reply.status == 400
    assert "prefill_keep: a prompt with pin" in reply.json["error"]["message"]


@every_api
def test_a_worker_without_a_draft_model_refuses_it_by_name(front_without: Front, path: str) -> None:
    """With the option that would change it."""
    body, max_tokens, *_ = APIS[path]
    reply = post(front_without, path, {**body, max_tokens: 6, "prefill_keep": 0.5})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("prefill_keep: this worker has no draft model")
    assert "--draft" in reply.json["error"]["message"]
