"""Ollama's API, as its own Python client reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import ollama
import pytest

from tests.http.front import Front, post, serving
from tests.http.programs.programs_of_others import results_of, wanted
from tests.http.scripted import TOOLS_TEMPLATE, ScriptedClient
from zmqengine.errors import WorkerLost
from zmqengine.protocol.messages import Constraint, Description
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

KEY = "a-long-enough-key"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FACTS: dict[str, str | bool | int] = {
    "tool_parser": "json_tools", "think_start": "<think>", "think_end": "</think>", "default_temperature": "0.6",
}  # fmt: skip
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}off {% endif %}"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


class ConstrainedClient(ScriptedClient):
    """A worker that takes constraints; what it says is the script's."""

    async def describe(self) -> Description:
        description = await super().describe()
        assert description.limits
        limits = msgspec.structs.replace(description.limits, constraints=True)
        return msgspec.structs.replace(description, limits=limits)


def say(prompt: str) -> str:
    """Adds when it has a tool; thinks unless that is off; otherwise repeats the question."""
    if "fail" in prompt:
        raise WorkerLost("gone")
    if "without end" in prompt:
        return "word " * 600
    if "tool: 3" in prompt:
        return "It is 3."
    if "tools:" in prompt:
        return f"I add.{CALL}"
    asked = prompt.rpartition("user: ")[2].split("\n")[0]
    return f"You said: {asked}" if prompt.startswith("off ") else f"<think>hm</think>You said: {asked}"


@pytest.fixture(scope="module")
def model() -> ScriptedClient:
    return ConstrainedClient(say, template=SWITCH + TOOLS_TEMPLATE, facts=FACTS)


@pytest.fixture(scope="module")
def front(model: ScriptedClient) -> Iterator[Front]:
    with serving(HttpConfig(api_keys=(KEY,)), lambda *_: model) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module")
def client(front: Front) -> ollama.Client:
    return ollama.Client(front.url, headers={"authorization": f"Bearer {KEY}"})


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: one
      b: the other
    """
    return a + b


HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_has_its_text_its_thinking_and_its_counts(client: ollama.Client) -> None:
    """Whole, as the client's own types."""
    reply = client.chat("scripted", HELLO)
    assert reply.message.thinking == "hm"
    assert reply.message.content is not None
    assert reply.message.content.startswith("You said: hello")
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", "scripted")
    assert reply.prompt_eval_count
    assert reply.eval_count
    assert reply.total_duration


def test_a_chat_streams_line_by_line(client: ollama.Client) -> None:
    """The pieces are the whole, and only the last says done."""
    pieces = list(client.chat("scripted", HELLO, stream=True))
    assert len(pieces) > 10
    assert "".join(piece.message.thinking or "" for piece in pieces) == "hm"
    assert "".join(piece.message.content or "" for piece in pieces).startswith("You said: hello")
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(client: ollama.Client, model: ScriptedClient, stream: bool) -> None:
    """A Python function as the tool; its result goes back by name, without an id."""
    messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
    if stream:
        calls = [
            call
            for piece in client.chat("scripted", messages, tools=[add], stream=True)
            for call in piece.message.tool_calls or []
        ]
    else:
        calls = list(client.chat("scripted", messages, tools=[add]).message.tool_calls or [])
    (call,) = calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": str(add(**call.function.arguments))},
    ]
    assert client.chat("scripted", messages, tools=[add], think=False).message.content == "It is 3."
    assert '"description": "Adds two numbers."' in model.prompts[-1]


@pytest.mark.parametrize(("think", "thought"), [(True, "hm"), ("low", "hm"), (False, None)])
def test_thinking_is_turned_on_and_off(client: ollama.Client, think: Any, thought: str | None) -> None:
    """By a switch or a level."""
    assert client.chat("scripted", HELLO, think=think).message.thinking == thought
    assert client.generate("scripted", "hello", think=think).thinking == thought


def test_a_format_becomes_a_constraint(client: ollama.Client, model: ScriptedClient) -> None:
    """A schema or the word json, in both endpoints."""
    for ask in (
        lambda format_: client.chat("scripted", HELLO, format=format_),
        lambda format_: client.generate("scripted", "hello", format=format_),
        lambda format_: client.generate("scripted", "hello", format=format_, raw=True),
    ):
        ask(SCHEMA)
        constraint = model.options[-1]["constraint"]
        assert isinstance(constraint, Constraint)
        assert '"sum"' in constraint.text
        ask("json")
        assert isinstance(model.options[-1]["constraint"], Constraint)


def test_options_are_those_of_the_other_apis(client: ollama.Client, model: ScriptedClient) -> None:
    """Honoured under their names, and refused by them for a value out of range."""
    options = {
        "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "num_predict": 5, "num_ctx": 2048,
        "repeat_penalty": 1.25, "stop": ["STOP"], "num_gpu": 99, "mirostat": 0,
    }  # fmt: skip
    reply = client.chat("scripted", HELLO, options=options, keep_alive="5m", think=False)
    given = model.options[-1]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "repetition_penalty")
    assert [given[name] for name in names] == [0.25, 7, 0.5, 0.1, 3, 5, 1.25]
    assert (reply.done_reason, reply.eval_count) == ("length", 5)
    client.generate("scripted", "hello", raw=True)
    assert model.options[-1]["max_tokens"] is None
    for refused in ({"num_ctx": 100_000}, {"temperature": -1}):
        with pytest.raises(ollama.ResponseError, match=next(iter(refused))) as caught:
            client.chat("scripted", HELLO, options=refused)
        assert caught.value.status_code == 400


def test_ignored_fields_are_told(front: Front) -> None:
    """Of the request and of its options, in one header."""
    body = {"model": "scripted", "messages": HELLO, "stream": False, "keep_alive": 1, "brand_new": 1,
            "options": {"num_gpu": 1}}  # fmt: skip
    reply = post(front, "/api/chat", body, authorization=f"Bearer {KEY}")
    assert reply.status == 200
    assert reply.headers["x-ignored-fields"] == "keep_alive, brand_new, num_gpu"


OLD_OPTIONS = {
    "num_keep": 5, "typical_p": 0.7, "repeat_last_n": 33, "penalize_newline": True, "numa": False, "main_gpu": 0,
    "num_batch": 2, "vocab_only": False, "f16_kv": True, "logits_all": False, "num_gqa": 1, "mirostat": 2,
    "rope_frequency_base": 1e4, "draft_num_predict": 4, "num_thread": 8, "use_mmap": True, "brand_new": [1],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_options_without_effect_are_ignored_and_told(front: Front, path: str) -> None:
    """Ollama warns in its log and goes on, so clients send what some version of it once knew."""
    body = {"model": "scripted", "messages": HELLO, "prompt": "hello", "raw": path == "/api/generate",
            "stream": False, "options": OLD_OPTIONS}  # fmt: skip
    reply = post(front, path, body, authorization=f"Bearer {KEY}")
    assert reply.status == 200
    told = set(reply.headers["x-ignored-fields"].split(", "))
    assert told - {"messages", "prompt", "raw"} == OLD_OPTIONS.keys()


def test_a_prompt_goes_through_the_template_or_raw(client: ollama.Client, model: ScriptedClient) -> None:
    """With its system prompt; raw it stands alone."""
    reply = client.generate("scripted", "hello", system="Be brief.", think=False)
    assert reply.response.startswith("You said: hello")
    assert "system: Be brief." in model.prompts[-1]
    client.generate("scripted", "hello", raw=True)
    assert model.prompts[-1] == "hello"
    pieces = list(client.generate("scripted", "hello", stream=True, think=False))
    assert "".join(piece.response or "" for piece in pieces).startswith("You said: hello")


def test_an_empty_request_loads_the_model(client: ollama.Client) -> None:
    """Which it is; programs send it before their first question."""
    assert client.generate("scripted").done_reason == "load"
    assert client.chat("scripted").done_reason == "load"
    assert client.pull("scripted").status == "success"


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    """With the context and the capabilities that programs look for; the default tag is Ollama's."""
    assert [model.model for model in client.list().models] == ["scripted"]
    (loaded,) = client.ps().models
    assert loaded.context_length == 4096
    shown = client.show("scripted:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["mlx.context_length"] == 4096
    assert client.chat("scripted:latest", HELLO).done


def test_logprobs_have_their_tokens(client: ollama.Client) -> None:
    """In the form of OpenAI's."""
    reply = client.chat(
        "scripted", HELLO, think=False, logprobs=True, top_logprobs=2, options={"num_predict": 3}
    )
    assert reply.logprobs is not None
    assert [entry.token for entry in reply.logprobs] == list("You")


@pytest.mark.parametrize("image", ["newest", "earlier"])
def test_images_are_refused_or_told(client: ollama.Client, model: ScriptedClient, image: str) -> None:
    """As in the other APIs."""
    seen: list[Any] = [{"role": "user", "content": "look", "images": ["AA=="]}]
    if image == "newest":
        with pytest.raises(ollama.ResponseError, match="reads text only"):
            client.chat("scripted", seen)
    else:
        client.chat("scripted", [*seen, {"role": "assistant", "content": "no"}, *HELLO])
        assert "look[an image, which this model cannot see" in model.prompts[-1]


def test_errors_are_its_own(client: ollama.Client, front: Front) -> None:
    """A sentence under `error`, with the status."""
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        client.chat("other", HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="stop") as invalid:
        client.chat("scripted", HELLO, options={"stop": ["x"] * 99})
    assert invalid.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="key") as stranger:
        ollama.Client(front.url).list()
    assert stranger.value.status_code == 401
    with pytest.raises(ollama.ResponseError) as lost:
        client.chat("scripted", [{"role": "user", "content": "fail"}])
    assert lost.value.status_code == 503


@pytest.mark.slow
@wanted
def test_the_client_for_javascript_works(front: Front, tmp_path: Path) -> None:
    """Every check of the script; all results are printed."""
    results = results_of("ollama_js.mjs", front.url, KEY, environment="", scratch=tmp_path)
    assert len(results) == 7
    assert not {result["name"]: result["error"] for result in results if result["error"]}
