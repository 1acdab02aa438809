"""Anthropic's messages and tools as chat templates read them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from zmqengine_http.apis.anthropic.conversation import template_messages, template_tools
from zmqengine_http.apis.anthropic.request import AnthropicTool, CountRequest
from zmqengine_http.serving.errors import ApiError


def plain(messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, object]]:
    return template_messages(msgspec.convert({"model": "m", "messages": messages, **fields}, CountRequest))


def text(value: str, **fields: object) -> dict[str, object]:
    return {"type": "text", "text": value, **fields}


def test_a_tool_turn_becomes_a_call_and_its_result() -> None:
    """With thinking and text before the call, and what the user says after the results."""
    made = plain(
        [
            {"role": "user", "content": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"path": "p"}, "caller": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    text("and then?"),
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("x"), text("y")]},
                ],
            },
        ],
        system=[text("one"), text("two", cache_control={"type": "ephemeral"})],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"path": "p"}}}
    assert made == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "x\ny"},
        {"role": "user", "content": "and then?"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no such file", "Error: no such file"),
        ([text("no")], "Error: no"),
        (None, "Error: "),
        ([], "Error: "),
    ],
)
def test_a_failed_result_says_so(content: object, said: str) -> None:
    """Templates have no place for is_error."""
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    assert plain([{"role": "user", "content": [block]}])[0]["content"] == said


def test_system_messages_keep_their_place() -> None:
    """What becomes of them there is the stable head's to say."""
    made = plain([{"role": "user", "content": "1"}, {"role": "system", "content": [text("plan")]}])
    assert made[1] == {"role": "system", "content": "plan"}


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "brand_new"])
def test_what_a_text_model_cannot_read_is_refused_by_name(kind: str) -> None:
    """Also inside a tool's result."""
    block = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    for content in ([block], [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]):
        with pytest.raises(ApiError, match=rf"messages\[0\]\.content\[0\].*{kind}") as refused:
            plain([{"role": "user", "content": content}])
        assert refused.value.status == 400


def test_plain_text_documents_are_text() -> None:
    """The one source that is."""
    block = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
    assert plain([{"role": "user", "content": [block]}])[0]["content"] == "hello"


def test_what_a_server_ran_is_left_out() -> None:
    """Another server's searches and their results mean nothing to this model."""
    content = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
        text("found"),
    ]
    assert plain([{"role": "assistant", "content": content}]) == [{"role": "assistant", "content": "found"}]


@pytest.mark.parametrize(
    ("block", "at"),
    [
        ({"type": "tool_use", "id": "t", "input": {}}, "name"),
        ({"type": "tool_use", "id": "t", "name": "n", "input": "{}"}, "input"),
        ({"type": "text"}, "text"),
    ],
)
def test_a_block_without_its_field_is_refused_where_it_stands(block: dict[str, object], at: str) -> None:
    """The path says which."""
    with pytest.raises(ApiError) as refused:
        plain([{"role": "assistant", "content": [text("a"), block]}])
    assert refused.value.param == f"messages[0].content[1].{at}"


def test_tools_need_no_type_and_those_of_the_server_are_left_out() -> None:
    """Claude Code sends web_search with a request of its own."""
    tools = msgspec.convert(
        [
            {
                "name": "a",
                "description": "d",
                "input_schema": {"type": "object"},
                "eager_input_streaming": True,
            },
            {"type": "custom", "name": "b", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "s"},
        ],
        list[AnthropicTool],
    )
    assert template_tools(tools) == [
        {"type": "function", "function": {"name": "a", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}},
    ]
