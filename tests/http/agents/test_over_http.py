"""Messages and Responses through the whole front-end, from a model that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.agents.sse import events, types
from tests.http.front import Front, Reply, get, post, serving
from tests.http.scripted import TOOLS_TEMPLATE, ScriptedClient
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.errors import Overloaded, WorkerLost
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

CALL = '<tool_call>{"name": "add", "arguments": {"b": 1, "a": 2}}</tool_call>'
FACTS: dict[str, str | bool | int] = {
    "tool_parser": "json_tools",
    "think_start": "<think>",
    "think_end": "</think>",
}
# Renders reasoning and calls as Qwen's template does: the reasoning of calls since the user last spoke is kept.
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant: "
)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USED = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


class Model:
    """What the model of the front-end says."""

    def __init__(self) -> None:
        self.text = "Hi."
        self.error: Exception | None = None
        self.client = ScriptedClient(self.say, facts=FACTS, template=TEMPLATE)

    def say(self, prompt: str) -> str:
        if self.error:
            raise self.error
        return self.text

    @property
    def prompt(self) -> str:
        return self.client.prompts[-1]


@pytest.fixture(scope="module")
def shared() -> Model:
    return Model()


@pytest.fixture(scope="module")
def front(shared: Model) -> Iterator[Front]:
    with serving(HttpConfig(keepalive_ms=100), lambda *_: shared.client) as front:  # type: ignore[arg-type]
        yield front


@pytest.fixture
def model(shared: Model) -> Iterator[Model]:
    yield shared
    shared.text, shared.error = "Hi.", None


def ask(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    """A Messages request."""
    return {
        "model": "scripted",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": content}],
        **fields,
    }


def blocks(reply: Reply) -> list[dict[str, Any]]:
    """The content of a message, streamed or not."""
    if reply.headers["content-type"] == "application/json":
        return list(reply.json["content"])
    built: list[dict[str, Any]] = []
    for event in events(reply.body):
        if event["type"] == "content_block_start":
            built.append(event["content_block"] | {"json": ""})
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            for field in ("text", "thinking", "signature"):
                if field in delta:
                    built[-1][field] += delta[field]
            built[-1]["json"] += delta.get("partial_json", "")
    for block in built:
        if arguments := block.pop("json"):
            block["input"] = json.loads(arguments)
    return built


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_with_thinking_text_and_a_call(model: Model, front: Front, stream: bool) -> None:
    """The same blocks streamed and whole; any beta and any further key is taken."""
    model.text = f"<think>hm</think>I add.{CALL}"
    body = ask(
        stream=stream, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        context_management={"edits": []}, brand_new={"x": 1}, thinking={"type": "adaptive"}, temperature=1,
        metadata={"user_id": "u"},
    )  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "one-2026,two-2027"}
    reply = post(front, f"{MESSAGES}?beta=true", body | {"max_tokens": 100}, **headers)
    assert reply.status == 200, reply.body
    thinking, text, call = blocks(reply)
    assert (thinking["thinking"], text["text"]) == ("hm", "I add.")
    assert thinking["signature"]
    assert (call["name"], call["input"]) == ("add", {"b": 1, "a": 2})
    assert '"name": "add"' in model.prompt
    assert "web_search" not in model.prompt
    if stream:
        start, *_, delta, stop = events(reply.body)
        assert start["message"]["usage"]["input_tokens"] > 20
        assert (delta["delta"]["stop_reason"], stop["type"]) == ("tool_use", "message_stop")
    else:
        assert reply.json["stop_reason"] == "tool_use"


def test_reasoning_that_a_client_dropped_is_rendered_again(model: Model, front: Front) -> None:
    """And the arguments in the order in which the model wrote them."""
    model.text = f"<think>hm</think>{CALL}"
    (_, call) = blocks(post(front, MESSAGES, ask(tools=[TOOL], max_tokens=100)))
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [call | {"input": {"a": 2, "b": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "3"}]},
    ]
    generated = model.prompt + f"<think>hm</think>{CALL}"
    post(front, MESSAGES, ask(tools=[TOOL], max_tokens=100) | {"messages": messages})
    assert model.prompt.startswith(generated)


def test_a_stop_sequence_is_named(model: Model, front: Front) -> None:
    """Which one it was; white space alone is none."""
    model.text = "one STOP two"
    reply = post(front, MESSAGES, ask(stop_sequences=["STOP", " "]))
    assert (reply.json["stop_reason"], reply.json["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply.json["content"][0]["text"] == "one "


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}, "tools": [TOOL]}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
        ({"max_tokens": 10_000}, "input length and `max_tokens` exceed context limit"),
        ({"temperature": 2}, "temperature"),
        ({"messages": [{"role": "assistant", "content": [USED]}]}, "results are missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "prompt is too long"),
        ({"messages": []}, "messages"),
    ],
)
def test_messages_refuses_in_its_own_shape(front: Front, fields: dict[str, Any], words: str) -> None:
    """What cannot be honoured is said, before anything is streamed."""
    reply = post(front, MESSAGES, ask(stream=True) | fields)
    assert reply.status == 400
    assert set(reply.json) == {"type", "error", "request_id"}
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert words in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("the queue is full", retry_after_ms=1500), 429, "rate_limit_error"),
        (WorkerLost("gone"), 529, "overloaded_error"),
    ],
)
def test_a_busy_worker_is_told_with_the_time_to_wait(
    model: Model, front: Front, error: Exception, status: int, kind: str
) -> None:
    """Clients wait as long as the header says."""
    model.error = error
    reply = post(front, MESSAGES, ask())
    assert (reply.status, reply.json["error"]["type"]) == (status, kind)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["request-id"] == reply.json["request_id"]


def test_no_tools_are_offered_where_none_may_be_used(model: Model, front: Front) -> None:
    """`none` is honoured, and one call at a time too."""
    model.text = CALL + CALL
    post(front, MESSAGES, ask(tools=[TOOL], tool_choice={"type": "none"}, max_tokens=200))
    assert "tools:" not in model.prompt
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = post(front, MESSAGES, ask(tools=[TOOL], tool_choice=choice, max_tokens=200))
    assert [block["type"] for block in blocks(reply)] == ["tool_use"]


def test_tokens_are_counted_as_they_will_be(model: Model, front: Front) -> None:
    """System prompt and tools included; max_tokens is not asked for."""
    body = ask("hi", system="be brief", tools=[TOOL])
    usage = post(front, MESSAGES, body).json["usage"]
    del body["max_tokens"]
    counted = post(front, f"{MESSAGES}/count_tokens?beta=true", body).json
    # The scripted worker says that three tokens were cached.
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert post(front, f"{MESSAGES}/count_tokens", ask("hi")).json["input_tokens"] < counted["input_tokens"]


def test_a_session_names_its_worker(model: Model, front: Front) -> None:
    """Claude Code's header goes to the choice of the worker, and the head of the prompt is made stable."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be."}]
    post(front, MESSAGES, ask("hi", system=system), **{"x-claude-code-session-id": "s"})
    assert model.prompt.startswith("system: Be.user: hi")
    counted = front.service.meter.registry.get_sample_value(
        "zmqengine_http_head_changes_total", {"kind": "billing_lines"}
    )
    assert counted == 1


FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_reasoning_text_and_a_call(model: Model, front: Front, stream: bool) -> None:
    """As Codex asks for it; its hosted tools are left out and its namespaces come back."""
    model.text = "<think>hm</think>I add." + CALL.replace("add", "mcp__m__add")
    body = {
        "model": "scripted", "instructions": "be brief", "stream": stream, "store": False,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1"}]}],
        "tools": [{"type": "namespace", "name": "mcp__m", "tools": [FUNCTION]}, {"type": "web_search"}],
        "tool_choice": "auto", "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "k", "client_metadata": {"a": "b"},
    }  # fmt: skip
    reply = post(front, RESPONSES, body)
    assert reply.status == 200, reply.body
    response = events(reply.body)[-1]["response"] if stream else reply.json
    reasoning, message, call = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I add."
    assert (call["name"], call["namespace"]) == ("add", "mcp__m")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["store"] is False
    # Sent back as it came, it renders as it was generated.
    generated = model.prompt + model.text
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    reasoning |= {"summary": []}
    post(front, RESPONSES, body | {"input": [*body["input"], reasoning, message, call, output]})  # type: ignore[misc]
    assert model.prompt.startswith(generated)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tool_choice": "required", "tools": [FUNCTION]}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format"),
        ({"brand_new": 1}, "brand_new"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ],
)
def test_responses_refuses_what_it_cannot_do(front: Front, fields: dict[str, Any], param: str) -> None:
    """By name, in OpenAI's shape."""
    reply = post(front, RESPONSES, {"input": "hi", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "error", "status", "code"),
    [
        ({"max_output_tokens": 100_000}, None, 400, "context_length_exceeded"),
        ({}, Overloaded("the queue is full", retry_after_ms=1500), 429, "rate_limit_exceeded"),
        ({}, WorkerLost("gone"), 503, "server_is_overloaded"),
    ],
)
def test_codex_is_told_by_event_what_others_are_told_by_status(
    model: Model, front: Front, fields: dict[str, Any], error: Exception | None, status: int, code: str
) -> None:
    """It acts on the code of a failed response, and gives up on the same as a status."""
    model.error = error
    body = {"input": "x" * 5000 if fields else "hi", "stream": True}
    assert post(front, RESPONSES, body).status == status
    reply = post(front, RESPONSES, body, originator="codex_exec")
    assert reply.status == 200
    assert events(reply.body)[-1]["response"]["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
def test_items_made_here_may_be_referred_to(model: Model, front: Front, stream: bool) -> None:
    """The Vercel AI SDK does so unless it is told not to store; what was not to be stored is not there."""
    model.text = f"<think>hm</think>I add.{CALL}"
    body = {"input": [{"role": "user", "content": "hi"}], "tools": [FUNCTION], "stream": stream}
    reply = post(front, RESPONSES, body)
    output = (events(reply.body)[-1]["response"] if stream else reply.json)["output"]
    generated = model.prompt + model.text
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"}
    assert post(front, RESPONSES, body | {"input": [*body["input"], *references, result]}).status == 200  # type: ignore[misc]
    assert model.prompt.startswith(generated)
    private = post(front, RESPONSES, body | {"store": False, "stream": False}).json["output"]
    reply = post(front, RESPONSES, body | {"input": [{"type": "item_reference", "id": private[0]["id"]}]})
    assert (reply.status, reply.error["param"]) == (400, "input[0]")


@pytest.mark.parametrize(("given", "said"), [(None, True), (True, True), (False, False)])
def test_a_response_says_whether_it_is_remembered(
    model: Model, front: Front, given: bool | None, said: bool
) -> None:
    """It is, unless the request says otherwise: OpenAI's default."""
    reply = post(front, RESPONSES, {"input": "hi", "store": given})
    assert (reply.status, reply.json["store"]) == (200, said)
    assert get(front, f"{RESPONSES}/{reply.json['id']}").status == (200 if said else 404)


def test_templates_that_reason_by_themselves_are_told_not_to_unless_asked() -> None:
    """Anthropic's default is no thinking; a small title request must not think for minutes."""
    template = TOOLS_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}(fast){% endif %}"
    client = ScriptedClient(lambda prompt: "x", template=template, facts=FACTS)
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        asked = {"type": "enabled", "budget_tokens": 5}
        for thinking, fast in ((None, True), ({"type": "disabled"}, True), (asked, False)):
            assert post(front, MESSAGES, ask(thinking=thinking)).status == 200
            assert client.prompts[-1].endswith("(fast)") is fast


@pytest.mark.parametrize(
    ("path", "body", "waiting", "kept"),
    [
        (MESSAGES, ask() | {"model": "fake"}, "ping", "message_start"),
        (RESPONSES, {"input": "hi"}, "response.in_progress", "response.created"),
    ],
)
def test_a_long_prompt_is_waited_for_with_real_events(
    slow_front: Front, path: str, body: dict[str, Any], waiting: str, kept: str
) -> None:
    """Their readers count no comments."""
    reply = post(slow_front, path, body | {"stream": True})
    assert types(reply.body)[:2] == [kept, waiting]
    assert types(reply.body).count(kept) == 1


@pytest.fixture(scope="module")
def slow_front() -> Iterator[Front]:
    """A worker that takes longer for each step than a client may hear nothing."""
    with (
        FakeWorker(FakeEngineConfig(step_ms=300, eos_index=1)) as worker,
        serving(HttpConfig(workers=(worker.address,), keepalive_ms=100)) as front,
    ):
        yield front


SEEN = "[an image, which this model cannot see: it reads text only]"
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
IMAGE_INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "field", "turns"),
    [
        (
            "/v1/chat/completions",
            "messages",
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": [IMAGE_PART]},
            ],
        ),
        (
            "/v1/chat/completions",
            "messages",
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "see the next message"},
                {"role": "user", "content": [{"type": "text", "text": "the file:"}, IMAGE_PART]},
            ],
        ),
        (
            MESSAGES,
            "messages",
            [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE_BLOCK]}],
                },
            ],
        ),
        (
            RESPONSES,
            "input",
            [
                {"role": "user", "content": "go"},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [IMAGE_INPUT]},
            ],
        ),
    ],
    ids=["chat", "chat, beside the result", "messages", "responses"],
)
def test_an_image_from_a_tool_does_not_end_the_session(
    model: Model, front: Front, path: str, field: str, turns: list[dict[str, Any]]
) -> None:
    """Neither the turn in which it comes nor those that send it again."""
    body: dict[str, Any] = {"model": "scripted"} | ({"max_tokens": 50} if path == MESSAGES else {})
    further: list[dict[str, Any]] = [
        {"role": "assistant", "content": "I cannot see it."},
        {"role": "user", "content": "say hello"},
    ]
    for conversation in (turns, turns + further):
        reply = post(front, path, body | {field: conversation})
        assert reply.status == 200, reply.body
        assert SEEN in model.prompt


@pytest.mark.parametrize(
    ("path", "field", "image", "at"),
    [
        ("/v1/chat/completions", "messages", IMAGE_PART, "messages[0].content[0]"),
        (MESSAGES, "messages", IMAGE_BLOCK, "messages[0].content[0]"),
        (RESPONSES, "input", IMAGE_INPUT, "input[0].content[0]"),
    ],
)
def test_an_image_in_the_newest_question_is_refused_without_tools(
    model: Model, front: Front, path: str, field: str, image: dict[str, Any], at: str
) -> None:
    """With its place, and the reason: the model reads text only. An agent offers tools, and would send it for ever."""
    body: dict[str, Any] = {"model": "scripted"} | ({"max_tokens": 50} if path == MESSAGES else {})
    reply = post(front, path, body | {field: [{"role": "user", "content": [image]}]})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith(f"{at}: this model reads text only")
    tool: dict[str, Any] = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
    offered = {
        "/v1/chat/completions": {"type": "function", "function": tool},
        MESSAGES: {"name": "add", "input_schema": {"type": "object"}},
        RESPONSES: {"type": "function", **tool},
    }[path]
    reply = post(front, path, body | {field: [{"role": "user", "content": [image]}], "tools": [offered]})
    assert reply.status == 200, reply.body
    assert SEEN in model.prompt
