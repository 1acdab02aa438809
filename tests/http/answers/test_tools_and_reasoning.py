"""Tool calls and reasoning over HTTP, from a model that says what the test wants."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.answers.conftest import CALL, FACTS, TOOLS, Model
from tests.http.front import Front, Reply, chat, post, serving
from tests.http.scripted import TOOLS_TEMPLATE, ScriptedClient
from zmqengine_http import HttpConfig


def deltas(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200
    return [event["choices"][0]["delta"] for event in reply.events if event["choices"]]


def test_a_call_is_streamed_as_a_call(model: Model, front: Front) -> None:
    """Id, name and arguments come as deltas while they are written; the reason to finish is tool_calls."""
    model.text = f"I add.\n{CALL}"
    reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, stream=True))
    calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    assert len(calls) > 3
    assert [call["function"].get("name") for call in calls][:2] == ["add", None]
    assert calls[0]["id"].startswith("call_")
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"a": 1, "b": "\u00e9"}
    assert "".join(str(delta.get("content", "")) for delta in deltas(reply)) == "I add.\n"
    assert reply.events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_is_in_the_message_when_not_streamed(model: Model, front: Front) -> None:
    """The message holds the calls, and content is null when there is none."""
    model.text = CALL + "\n" + CALL
    choice = post(front, "/v1/chat/completions", chat(tools=TOOLS)).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add", "add"]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


def test_parallel_tool_calls_false_ends_after_the_first(model: Model, front: Front) -> None:
    """The second call is never made, and the worker need not finish it."""
    model.text = CALL + CALL
    reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, parallel_tool_calls=False))
    assert len(reply.json["choices"][0]["message"]["tool_calls"]) == 1
    assert reply.json["usage"]["completion_tokens"] == len(CALL.removesuffix("}</tool_call>").encode())


def test_tool_choice_none_hides_the_tools(model: Model, front: Front) -> None:
    """The model is not told of the tools, and what looks like a call is text."""
    model.text = CALL
    choice = post(front, "/v1/chat/completions", chat(tools=TOOLS, tool_choice="none")).json["choices"][0]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert "tools:" not in model.client.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content(model: Model, front: Front, stream: bool) -> None:
    """omlx #2012, mlx-lm #1441: it falls back to text, and the stream ends well."""
    model.text = '<tool_call>{"name": add, "arguments": {"a": </tool_call> sorry'
    reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, stream=stream))
    if stream:
        assert "".join(str(delta.get("content", "")) for delta in deltas(reply)) == model.text
        assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert reply.json["choices"][0]["message"]["content"] == model.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_is_a_part_of_a_call(model: Model, front: Front, stream: bool) -> None:
    """As OpenAI sends it, with the reason length; it was content that shows the markers of the model."""
    model.text = CALL
    limit = len(CALL.removesuffix('"\u00e9"}}</tool_call>').encode())
    reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, stream=stream, max_tokens=limit))
    if stream:
        calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert not any(delta.get("content") for delta in deltas(reply))
        reason = reply.events[-1]["choices"][0]["finish_reason"]
    else:
        choice = reply.json["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        arguments, reason = call["function"]["arguments"], choice["finish_reason"]
        assert choice["message"]["content"] is None
    assert (arguments, reason) == ('{"a":1,"b":', "length")


def test_reasoning_is_apart_and_counted(model: Model, front: Front) -> None:
    """reasoning_content and content are two fields, and usage tells the reasoning tokens."""
    model.text = "<think>hm</think>yes"
    body = post(front, "/v1/chat/completions", chat()).json
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert body["usage"]["completion_tokens"] == len(model.text) + 1
    # This tokenizer spells the marker in bytes; reasoning is known from its last one on.
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(">hm</think>")


def test_reasoning_is_streamed(model: Model, front: Front) -> None:
    """Reasoning deltas come before content deltas."""
    model.text = "<think>hm</think>yes"
    parts = deltas(post(front, "/v1/chat/completions", chat(stream=True)))
    assert "".join(str(part.get("reasoning_content", "")) for part in parts) == "hm"
    assert "".join(str(part.get("content", "")) for part in parts) == "yes"


def test_tools_go_to_the_template_and_arguments_come_as_objects(model: Model, front: Front) -> None:
    """A whole round trip: the definitions, the call and the tool's answer are in the prompt."""
    model.text = "2"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
    ]  # fmt: skip
    assert post(front, "/v1/chat/completions", {"messages": messages, "tools": TOOLS}).status == 200
    prompt = model.client.prompts[-1]
    assert '"name": "add"' in prompt
    assert "user: 1+1?" in prompt
    assert "tool: two" in prompt


def test_a_model_without_tools_refuses_calls_that_are_forced() -> None:
    """A template that takes no tools cannot tell the model of one; without force they are left out, and named."""
    template = TOOLS_TEMPLATE.split("{% endif %}", 1)[1]
    client = ScriptedClient(lambda prompt: "x", template=template)
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, tool_choice="required"))
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert post(front, "/v1/chat/completions", chat(tools=TOOLS, tool_choice="none")).status == 200
        assert post(front, "/v1/chat/completions", chat(tools=TOOLS)).headers["x-ignored-fields"] == "tools"


def test_chunks_of_many_tokens_make_the_same_answer() -> None:
    """A reader that is behind gets several tokens at once: text, calls and counts are the same."""
    text = f"<think>hm</think>I add. STOP {CALL}"
    bodies = []
    for chunk_tokens in (1, 7, 1000):
        client = ScriptedClient(lambda prompt: text, facts=FACTS, chunk_tokens=chunk_tokens)
        with serving(HttpConfig(), lambda *_, client=client: client) as front:
            whole = post(front, "/v1/chat/completions", chat(tools=TOOLS)).json
            cut = post(front, "/v1/chat/completions", chat(stop=["STOP"], logprobs=True)).json
        call = whole["choices"][0]["message"]["tool_calls"][0]["function"]
        bodies.append((call, whole["usage"], cut["choices"], cut["usage"]))
    assert bodies[0] == bodies[1] == bodies[2]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_the_template_opened_is_found(stream: bool) -> None:
    """Some templates end with the marker, so that the output begins within the reasoning."""
    client = ScriptedClient(
        lambda prompt: "hm</think>\n\nyes", template=TOOLS_TEMPLATE + "<think>\n", facts=FACTS
    )
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        reply = post(front, "/v1/chat/completions", chat(stream=stream))
    parts = deltas(reply) if stream else [reply.json["choices"][0]["message"]]
    assert "".join(part.get("reasoning_content", "") for part in parts) == "hm"
    assert "".join(part.get("content", "") for part in parts) == "yes"


def test_markers_that_are_special_tokens_are_seen() -> None:
    """Most models mark calls with special tokens, which a detokeniser leaves out; other special tokens stay out."""
    markers = ["<tool_call>", "</tool_call>"]
    client = ScriptedClient(lambda prompt: f"I add.{CALL}", facts=FACTS, special=markers)
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        body = post(front, "/v1/chat/completions", chat(tools=TOOLS)).json
    message = body["choices"][0]["message"]
    assert message["content"] == "I add."
    assert message["tool_calls"][0]["function"]["name"] == "add"
    # Each marker is one token here.
    assert body["usage"]["completion_tokens"] == len(f"I add.{CALL}".encode()) - len("".join(markers)) + 3


def test_gpt_oss_speaks_in_channels() -> None:
    """Its channels become the same three: reasoning, content and calls."""
    special = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
    said = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}'
    )
    template = TOOLS_TEMPLATE + "{# <|channel|> <|message|> #}"
    client = ScriptedClient(lambda prompt: said, template=template, special=special)
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        choice = post(front, "/v1/chat/completions", chat(tools=TOOLS)).json["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert choice["finish_reason"] == "tool_calls"


STOPPED: list[tuple[str, str, list[str], str, str, str]] = [
    ("in the reasoning", "<think>A Question: x</think>It is 4. Question: y", ["Question:"], "It is 4. ", "stop", ""),
    ("in the reasoning alone", "<think>END</think>It is 4.", ["END"], "It is 4.", "stop", ""),
    ("of the marker", "<think>a</think>b", ["</think>"], "b", "stop", ""),
    ("across the marker", "<think>aE</think>NDb", ["END"], "NDb", "stop", ""),
    ("at the start of the answer", "<think>a</think>ENDb", ["END"], "", "stop", ""),
    ("begun before a call", f"aEN{CALL}", ["END"], "aEN", "tool_calls", '{"a":1,"b":"\u00e9"}'),
    ("begun at the end", "<think>a</think>bEN", ["END"], "bEN", "stop", ""),
    ("behind a call", f"{CALL}bENDc", ["END"], "b", "tool_calls", '{"a":1,"b":"\u00e9"}'),
    ("in a call", CALL, ['"b"'], "", "length", '{"a":1,'),
    ("the first of two", "<think>B</think>x A B", ["B", "A"], "x ", "stop", ""),
]  # fmt: skip


@pytest.mark.parametrize(("said", "stop", "content", "finish", "arguments"), [each[1:] for each in STOPPED],
                         ids=[each[0] for each in STOPPED])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_for_the_answer(
    model: Model,
    front: Front,
    stream: bool,
    said: str,
    stop: list[str],
    content: str,
    finish: str,
    arguments: str,
) -> None:
    """lm-evaluation-harness sends "Question:" with each chat: one that was thought ended the answer before it began."""
    model.text = said
    reply = post(front, "/v1/chat/completions", chat(tools=TOOLS, stop=stop, stream=stream))
    if stream:
        seen = "".join(delta.get("content") or "" for delta in deltas(reply))
        calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", [])]
        reason = reply.events[-1]["choices"][0]["finish_reason"]
    else:
        choice = reply.json["choices"][0]
        seen, reason = choice["message"]["content"] or "", choice["finish_reason"]
        calls = choice["message"].get("tool_calls") or []
    assert (seen, reason) == (content, finish)
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
