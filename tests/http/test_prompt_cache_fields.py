"""`cache_scope` and `pin` over HTTP: who may go on from what was read of a prompt, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.http.serving import Front, get, serving
from zmqengine.engine.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

Ask = Callable[..., int]
"""Sends a text, with extra fields of the body; returns how many of its tokens were not read again."""


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """On a worker whose prompt cache has room for one long prompt and some short ones."""
    config = FakeEngineConfig(prompt_cache_bytes=600, kv_bytes_token=1, eos_index=3)
    with FakeWorker(config) as worker, serving(HttpConfig(workers=(worker.address,))) as front:
        yield front


def _ask_chat(front: Front, text: str, **extra: object) -> int:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": text}], max_tokens=4, extra_body=extra
        )
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


def _ask_completions(front: Front, text: str, **extra: object) -> int:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="fake", prompt=text, max_tokens=4, extra_body=extra)
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


def _ask_responses(front: Front, text: str, **extra: object) -> int:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="fake", input=text, max_output_tokens=4, extra_body=extra)
    assert answer.usage
    return answer.usage.input_tokens_details.cached_tokens


def _ask_messages(front: Front, text: str, **extra: object) -> int:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="fake", messages=[{"role": "user", "content": text}], max_tokens=4, extra_body=extra
        )
    return answer.usage.cache_read_input_tokens or 0


APIS = [_ask_chat, _ask_completions, _ask_responses, _ask_messages]


@pytest.mark.parametrize("ask", APIS)
def test_a_scope_goes_on_from_its_own_prompts_alone(front: Front, ask: Ask) -> None:
    """The same text is read once for each scope."""
    text = f"a text of {ask.__name__} " * 4
    for scope in ("shared", "session"):
        # The fake engine goes on from a prompt alone only if it is pinned.
        assert ask(front, text, cache_scope=scope, pin=True) == 0
        assert ask(front, text, cache_scope=scope) > 0


@pytest.mark.parametrize("ask", APIS)
def test_a_pinned_prompt_outlives_others(front: Front, ask: Ask) -> None:
    """What is not pinned has to go for the prompts that come after it."""
    for pin in (False, True):
        text = f"{pin} {ask.__name__} " * 4
        ask(front, text, pin=pin)
        for number in range(8):
            ask(front, f"{number} {pin} {ask.__name__} other " * 5)
        assert (ask(front, text) > 0) == pin


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize(("field", "value"), [("cache_scope", "everybody"), ("pin", "yes")])
def test_what_they_may_not_be_is_refused_by_name(front: Front, ask: Ask, field: str, value: str) -> None:
    """A 400, by whatever API."""
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=field):
        ask(front, "hi", **{field: value})


def test_they_are_described(front: Front) -> None:
    """With what a scope may be."""
    schemas: dict[str, Any] = get(front, "/openapi.json").json["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        fields = schemas[name]["properties"]
        assert {"key", "session", "shared"} <= {*fields["cache_scope"]["anyOf"][0]["enum"]}
        assert fields["pin"]["type"] == "boolean"
