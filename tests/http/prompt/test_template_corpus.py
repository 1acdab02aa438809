"""Every shape of a history that clients send, rendered by the chat templates of real models."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.template_trial import model_of, prompt_text
from zmqengine_http.apis.chat_completions.request import (
    ChatMessage,
    ToolDefinition,
    chat_template_messages,
    chat_template_tools,
)
from zmqengine_http.prompt.template import takes_tools
from zmqengine_http.workers.worker import Model

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
JsonObject = dict[str, Any]
USER: JsonObject = {"role": "user", "content": "USER-SAYS"}
SYSTEM: JsonObject = {"role": "system", "content": "SYSTEM-SAYS"}
FUNCTION: JsonObject = {
    "name": "look_up", "description": "Look a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The word."}},
        "required": ["word"],
    },
}  # fmt: skip


@functools.cache
def model(name: str) -> Model:
    return model_of(FILES[name].read_text(), {})


# By their text: to compile them all takes seconds, in each process that collects this file.
TAKING_TOOLS = [name for name, path in FILES.items() if re.search(r"\btools\b", path.read_text())]
WITH_CALLS = [name for name in TAKING_TOOLS if "tool_calls" in FILES[name].read_text() or name == "lfm2"]


def test_the_lists_are_those_of_the_compiled_templates() -> None:
    """A new template is tested by what it takes and writes."""
    assert [name for name in FILES if takes_tools(model(name))] == TAKING_TOOLS
    assert [name for name in TAKING_TOOLS if model(name).markers.calls or name in WITH_CALLS] == WITH_CALLS


def called(
    arguments: object = '{"word": "ARGUMENT-A"}', id_: str = "c1", *, name: str = "look_up", **more: object
) -> JsonObject:
    function = {"name": name, "arguments": arguments}
    call = {"id": id_, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def both() -> JsonObject:
    first, second = called(), called('{"word": "ARGUMENT-B"}', "c2")
    return {**first, "tool_calls": first["tool_calls"] + second["tool_calls"]}


def result(text: str = "RESULT-A", id_: str = "c1") -> JsonObject:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def prompt(name: str, messages: list[JsonObject], tools: list[JsonObject] | None = None) -> str:
    """The text of the prompt of a chat, from the JSON that a client sends."""
    read = chat_template_messages([msgspec.convert(_without_null(each), ChatMessage) for each in messages])
    offered = [
        msgspec.convert({"type": "function", "function": tool}, ToolDefinition) for tool in tools or ()
    ]
    return prompt_text(model(name), read, chat_template_tools(offered))


def _without_null(message: JsonObject) -> JsonObject:
    return {name: value for name, value in message.items() if value is not None}


ARGUMENTS = {
    "none": "", "null": None, "the word null": "null", "blanks": "  \n", "cut": '{"word": "ARGUM', "brace": "{",
    "a list": "[1]", "a text": '"x"', "a number": "3", "prose": "look it up", "single quotes": "{'word': 'x'}",
    "twice encoded": '"{\\"word\\": \\"x\\"}"', "an object": {"word": "x"}, "nested": {"word": {"a": [None, 1]}},
}  # fmt: skip


@pytest.mark.parametrize("shape", ARGUMENTS)
@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_of_any_arguments_is_no_end_of_a_session(name: str, shape: str) -> None:
    """A history is sent again with each turn: a refusal of one call refuses all that comes behind it."""
    messages = [USER, called(ARGUMENTS[shape]), result(), {"role": "user", "content": "AND-THEN"}]
    text = prompt(name, messages, [FUNCTION])
    assert "AND-THEN" in text
    assert "look_up" in text.replace("Look", "")
    if shape == "cut":
        assert "ARGUM" in text


@pytest.mark.parametrize("name", WITH_CALLS)
def test_results_stand_in_the_order_of_their_calls(name: str) -> None:
    """Agents that run tools at the same time send results as they come, and hardly a template writes ids."""
    in_order = [USER, both(), result(), result("RESULT-B", "c2")]
    other = [USER, both(), result("RESULT-B", "c2"), result()]
    text = prompt(name, other, [FUNCTION])
    assert text == prompt(name, in_order, [FUNCTION])
    assert text.find("RESULT-A") < text.find("RESULT-B")


TOOLS: dict[str, JsonObject] = {
    "a name alone": {"name": "look_up"},
    "no description": {"name": "look_up", "parameters": FUNCTION["parameters"]},
    "null": {"name": "look_up", "description": None, "parameters": None, "strict": None},
    "no properties": {"name": "look_up", "description": "d", "parameters": {"type": "object"}},
    "an empty schema": {"name": "look_up", "description": "d", "parameters": {}},
    "a property of no type": {
        "name": "look_up",
        "description": "d",
        "parameters": {"type": "object", "properties": {"word": {}}},
    },
    "an enum": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["a", None, 3]}}},
    },
    "a choice": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        },
    },
    "two types": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": ["string", "null"]}}},
    },
    "a list of objects": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "object", "properties": {"a": {}}}}},
        },
    },
    "a list of anything": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"words": {"type": "array"}}},
    },
    "strict": {**FUNCTION, "strict": True},
}


@pytest.mark.parametrize("shape", TOOLS)
@pytest.mark.parametrize("name", TAKING_TOOLS)
def test_a_tool_of_any_shape_is_offered(name: str, shape: str) -> None:
    """A description and a schema are optional in every API; templates write out no member that nobody sent."""
    text = prompt(name, [USER], [TOOLS[shape]])
    assert "USER-SAYS" in text
    assert "look_up" in text
    if shape == "null":
        assert text == prompt(name, [USER], [TOOLS["a name alone"]])
    if shape != "null" and shape != "strict":
        assert '"strict"' not in text


CHATS: dict[str, list[JsonObject]] = {
    "a system prompt alone": [SYSTEM],
    "a developer's alone": [{"role": "developer", "content": "SYSTEM-SAYS"}],
    "a developer's": [{"role": "developer", "content": "SYSTEM-SAYS"}, USER],
    "two of the user": [SYSTEM, USER, {"role": "user", "content": "AND-THEN"}],
    "two answers": [USER, {"role": "assistant", "content": "ONE."}, {"role": "assistant", "content": "TWO."}, USER],
    "an answer first": [{"role": "assistant", "content": "Hello."}, USER],
    "no text of the user": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "USER-"}, {"type": "text", "text": "SAYS"}]}],
}  # fmt: skip
WITH_TOOLS: dict[str, list[JsonObject]] = {
    "an agent goes on": [SYSTEM, called(), result()],
    "a result alone": [result()],
    "a result of no call": [USER, result(id_="other")],
    "a call without result": [USER, called(), {"role": "user", "content": "AND-THEN"}],
    "one of two results": [USER, both(), result("RESULT-B", "c2"), {"role": "user", "content": "AND-THEN"}],
    "reasoning": [USER, called(reasoning_content="I look it up."), result()],
    "a text beside a call": [USER, called(content="I look it up."), result()],
    "an empty result": [USER, called(), result("")],
    "a result twice": [USER, called(), result(), result("RESULT-B")],
    "a result and the user": [USER, called(), result(), {"role": "user", "content": "AND-THEN"}],
    "a call behind an answer": [USER, {"role": "assistant", "content": "I look it up."}, called(), result()],
    "a call of no offered tool": [
        USER,
        called(name="gone"),
        result(),
        {"role": "user", "content": "AND-THEN"},
    ],
    "results from last to first": [
        USER,
        {**called(), "tool_calls": [called(id_=f"c{n}")["tool_calls"][0] for n in range(6)]},
        *(result(f"RESULT-{n}", f"c{n}") for n in reversed(range(6))),
    ],
    "no calls in a list": [USER, {"role": "assistant", "content": "ONE.", "tool_calls": []}, USER],
    "no ids": [USER, called(id_=""), result(id_="")],
}


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("name", FILES)
def test_a_chat_of_any_shape_is_in_the_prompt(name: str, shape: str) -> None:
    """There is one right reading of each: no template's own rule is a refusal."""
    text = prompt(name, CHATS[shape])
    for each in chat_template_messages([msgspec.convert(each, ChatMessage) for each in CHATS[shape]]):
        assert str(each["content"]) in text


@pytest.mark.parametrize("shape", WITH_TOOLS)
@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_session_of_any_shape_is_in_the_prompt(name: str, shape: str) -> None:
    """Sessions are cut, compacted and resumed by agents at any message."""
    text = prompt(name, WITH_TOOLS[shape], [FUNCTION])
    for each in WITH_TOOLS[shape]:
        if each["role"] != "assistant":
            assert each["content"] in text
