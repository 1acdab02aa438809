"""Agents on chat completions: the shapes that opencode, Qwen Code and pi send, each through a tool turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.agents.scripted_agent import COMMAND, FACTS, TEMPLATE, say
from tests.http.front import Front, post, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

QUESTION = "use a tool"
SHELL_SCHEMA: Any = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command"},
        "description": {"type": "string"},
        "is_background": {"type": "boolean"},
        "timeout": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
    },
    "required": ["command"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Runs a command", "parameters": SHELL_SCHEMA, **more}
    return {"type": "function", "function": function}


def parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


# As captured: which fields, in which form, and how a call and its result come back with the next turn.
AGENTS: dict[str, dict[str, Any]] = {
    "opencode": {
        "body": {
            "temperature": 0, "top_p": 1, "max_tokens": 32000, "stream": True, "tool_choice": "auto",
            "stream_options": {"include_usage": True},
        },
        "system": [{"role": "system", "content": "You are an agent."}, {"role": "system", "content": "Be brief."}],
        "user": {"role": "user", "content": QUESTION},
        "tool": tool("bash"),
        "content_of_call": "",
        "result": lambda call, text: {"role": "tool", "tool_call_id": call, "content": text},
        "headers": {"user-agent": "opencode/1.18.33 ai-sdk/openai-compatible/1.0.29"},
    },
    "qwen-code": {
        "body": {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8000, "temperature": 0},
        "system": [{"role": "system", "content": parts("You are an agent.")}],
        "user": {"role": "user", "content": parts(QUESTION)},
        "tool": tool("run_shell_command"),
        "content_of_call": None,
        "result": lambda call, text: {"role": "tool", "tool_call_id": call, "content": parts(text)},
        "headers": {"user-agent": "QwenCode/0.15.10 (linux; x64)"},
    },
    "pi": {
        "body": {
            "stream": True, "stream_options": {"include_usage": True}, "store": False,
            "max_completion_tokens": 32000, "reasoning_effort": "medium",
        },
        "system": [{"role": "developer", "content": "You are an agent."}],
        "user": {"role": "user", "content": parts(QUESTION)},
        "tool": tool("bash", strict=False),
        "content_of_call": None,
        "result": lambda call, text: {"role": "tool", "content": text, "tool_call_id": call, "name": "bash"},
        "headers": {"user-agent": "pi/0.73.1"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def scripted() -> ScriptedClient:
    return ScriptedClient(say, template=TEMPLATE, facts=FACTS)


@pytest.fixture(scope="module")
def front(scripted: ScriptedClient) -> Iterator[Front]:
    with serving(HttpConfig(), lambda *_: scripted) as front:  # type: ignore[arg-type, return-value]
        yield front


def streamed(front: Front, agent: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, with its finish and usage."""
    body = {"model": "scripted", "messages": messages, "tools": [agent["tool"]], **agent["body"]}
    reply = post(front, "/v1/chat/completions", body, **agent["headers"])
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "usage": None}
    for event in reply.events:
        made["usage"] = event.get("usage") or made["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning_content") or ""
            made["finish"] = choice["finish_reason"] or made["finish"]
            for call in delta.get("tool_calls", []):
                if call.get("id"):
                    made["calls"].append(call | {"function": dict(call["function"])})
                else:
                    made["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return made


@pytest.mark.parametrize("name", AGENTS)
def test_a_tool_turn_in_the_shape_that_the_agent_sends(
    front: Front, scripted: ScriptedClient, name: str
) -> None:
    """The call streams, comes back in the agent's own words with its result, and the answer follows."""
    agent = AGENTS[name]
    messages = [*agent["system"], agent["user"]]
    first = streamed(front, agent, messages)
    assert first["finish"] == "tool_calls"
    assert first["usage"]["completion_tokens"] > 0
    (call,) = first["calls"]
    assert json.loads(call["function"]["arguments"])["command"] == COMMAND
    said = {"role": "assistant", "content": agent["content_of_call"], "tool_calls": [
        {"id": call["id"], "type": "function", "function": call["function"]}
    ]}  # fmt: skip
    second = streamed(front, agent, [*messages, said, agent["result"](call["id"], "42")])
    assert (second["finish"], second["content"]) == ("stop", "The tool said: 42")
    assert "You are an agent." in scripted.prompts[-1]
    assert COMMAND in scripted.prompts[-1].replace("\\u003e", ">")


def test_opencodes_title_request_has_two_user_messages(front: Front) -> None:
    """Beside the first turn, without tools."""
    body = {
        "model": "scripted", "temperature": 0.5, "max_tokens": 32000, "stream": True,
        "messages": [
            {"role": "system", "content": "You make titles."},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            {"role": "user", "content": QUESTION},
        ],
    }  # fmt: skip
    reply = post(front, "/v1/chat/completions", body)
    text = "".join(
        choice["delta"].get("content") or "" for event in reply.events for choice in event["choices"]
    )
    assert text == "Hello from the scripted model."
