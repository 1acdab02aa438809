"""`cache_scope` and `pin` over HTTP: who may go on from what was read of a prompt, and what stays."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from PIL import Image

from tests.http.front import Front, get, post, serving
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process


class Clients(NamedTuple):
    """Both programs, at one front-end."""

    front: Front
    gpt: openai.OpenAI
    claude: anthropic.Anthropic


Ask = Callable[..., int]
"""Sends a text, with extra fields of the body; returns how many of its tokens were not read again."""


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    """The worker's prompt cache has room for one long prompt and some short ones."""
    config = FakeEngineConfig(prompt_cache_bytes=600, kv_bytes_token=1, eos_index=3)
    with (
        FakeWorker(config) as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
        openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as gpt,
        anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as claude,
    ):
        yield Clients(front, gpt, claude)


def _chat(clients: Clients, text: str, **extra: object) -> int:
    answer = clients.gpt.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": text}], max_tokens=4, extra_body=extra
    )
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


def _completions(clients: Clients, text: str, **extra: object) -> int:
    answer = clients.gpt.completions.create(model="fake", prompt=text, max_tokens=4, extra_body=extra)
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


def _responses(clients: Clients, text: str, **extra: object) -> int:
    answer = clients.gpt.responses.create(model="fake", input=text, max_output_tokens=4, extra_body=extra)
    assert answer.usage
    return answer.usage.input_tokens_details.cached_tokens


def _messages(clients: Clients, text: str, **extra: object) -> int:
    answer = clients.claude.messages.create(
        model="fake", messages=[{"role": "user", "content": text}], max_tokens=4, extra_body=extra
    )
    return answer.usage.cache_read_input_tokens or 0


APIS = [_chat, _completions, _responses, _messages]


@pytest.mark.parametrize("ask", APIS)
def test_a_scope_goes_on_from_its_own_prompts_alone(clients: Clients, ask: Ask) -> None:
    """The same text is read once for each scope."""
    text = f"a text of {ask.__name__} " * 4
    for scope in ("shared", "session"):
        # The fake engine goes on from a prompt alone only if it is pinned.
        assert ask(clients, text, cache_scope=scope, pin=True) == 0
        assert ask(clients, text, cache_scope=scope) > 0


@pytest.mark.parametrize("ask", APIS)
def test_a_pinned_prompt_outlives_others(clients: Clients, ask: Ask) -> None:
    """What is not pinned has to go for the prompts that come after it."""
    for pin in (False, True):
        text = f"{pin} {ask.__name__} " * 4
        ask(clients, text, pin=pin)
        for number in range(4):
            ask(clients, f"{number} {pin} {ask.__name__} other " * 7)
        assert (ask(clients, text) > 0) == pin


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize(("field", "value"), [("cache_scope", "everybody"), ("pin", "yes")])
def test_what_they_may_not_be_is_refused_by_name(clients: Clients, ask: Ask, field: str, value: str) -> None:
    """A 400, by whatever API."""
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=field):
        ask(clients, "hi", **{field: value})


def test_they_are_described(clients: Clients) -> None:
    """With what a scope may be."""
    schemas: dict[str, Any] = get(clients.front, "/openapi.json").json["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        fields = schemas[name]["properties"]
        assert {"key", "session", "shared"} <= {*fields["cache_scope"]["anyOf"][0]["enum"]}
        assert fields["pin"]["type"] == "boolean"


KEYS = ("first-long-key", "other-long-key")


@pytest.fixture(scope="module")
def callers() -> Iterator[tuple[Clients, Clients]]:
    """Two callers with a key each, at one front-end."""
    config = FakeEngineConfig(prompt_cache_bytes=6000, kv_bytes_token=1, eos_index=3)
    with FakeWorker(config) as worker, serving(HttpConfig(workers=(worker.address,), api_keys=KEYS)) as front:
        first, second = (
            Clients(
                front,
                openai.OpenAI(base_url=front.url + "/v1", api_key=key, max_retries=0),
                anthropic.Anthropic(base_url=front.url, api_key=key, max_retries=0),
            )
            for key in KEYS
        )
        yield first, second


@pytest.mark.parametrize("scope", ["key", "session"])
@pytest.mark.parametrize("ask", APIS)
def test_a_key_of_the_front_end_has_a_scope_of_its_own(
    callers: tuple[Clients, Clients], ask: Ask, scope: str
) -> None:
    """Nobody learns from `usage` how much of another's prompt it has guessed."""
    first, second = callers
    text = f"a secret of {ask.__name__} and {scope} " * 4
    assert ask(first, text, cache_scope=scope, pin=True) == 0
    assert ask(second, text, cache_scope=scope, pin=True) == 0
    assert ask(first, text, cache_scope=scope) > 0
    assert ask(second, text, cache_scope=scope) > 0


def test_a_key_learns_of_no_image_that_another_has_shown() -> None:
    """Neither as a cached prompt nor as one that need not be sent."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    body = {
        "model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": [image]}], "pin": True,
        "cache_scope": "key",
    }  # fmt: skip
    with (
        FakeWorker(
            FakeEngineConfig(vision=True, prompt_cache_bytes=6000, kv_bytes_token=1, eos_index=3)
        ) as worker,
        serving(HttpConfig(workers=(worker.address,), api_keys=KEYS)) as front,
    ):
        cached = []
        for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1]):
            reply = post(front, "/v1/chat/completions", body, authorization=f"Bearer {key}")
            assert reply.status == 200, reply.body
            cached.append((reply.json["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_what_is_shared_is_shared_between_keys(callers: tuple[Clients, Clients]) -> None:
    """As it says."""
    first, second = callers
    assert _chat(first, "for all of us " * 4, cache_scope="shared", pin=True) == 0
    assert _chat(second, "for all of us " * 4, cache_scope="shared") > 0
