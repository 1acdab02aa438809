"""Anthropic's messages and tools as chat templates read them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from zmqengine_http.apis.anthropic.conversation import template_messages
from zmqengine_http.apis.anthropic.deferred_tools import DeferredTools
from zmqengine_http.apis.anthropic.request import CountRequest
from zmqengine_http.serving.errors import ApiError


def plain(messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, object]]:
    return read(messages, **fields)[0]


def read(messages: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, object]], DeferredTools]:
    """The messages for a template, and the tools."""
    request = msgspec.convert({"model": "m", "messages": messages, **fields}, CountRequest)
    deferred = DeferredTools(request)
    return template_messages(request, deferred), deferred


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


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize("kind", ["image", "document", "brand_new"])
def test_content_beside_text_in_the_newest_question_is_refused_by_name(kind: str) -> None:
    """The user would wait for an answer that cannot be about it."""
    with pytest.raises(ApiError, match=rf"messages\[2\]\.content\[1\].*{kind}") as refused:
        plain(
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes?"},
                {"role": "user", "content": [text("see"), IMAGE | {"type": kind}]},
                {"role": "system", "content": "a plan"},
            ]
        )
    assert refused.value.status == 400


def test_images_of_tools_and_of_earlier_turns_are_told_in_words() -> None:
    """An agent sends them again with each turn: a refusal would end its session."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("read:"), IMAGE]}
    pdf = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "AA=="}}
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [IMAGE, text("look")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, pdf]},
    ]
    hello = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "say hello"}]
    for conversation in (messages, messages + hello):
        made = plain(conversation)
        seen = "[an image, which this model cannot see: it reads text only]"
        assert made[0]["content"] == f"{seen}\nlook"
        assert made[2]["content"] == f"read:\n{seen}"
        assert made[3]["content"] == "[a document (a.pdf), which this model cannot see: it reads text only]"


def test_search_results_and_documents_of_text_blocks_are_text() -> None:
    """Both hold text in blocks."""
    found = {"type": "search_result", "title": "T", "source": "http://x", "content": [text("found")]}
    document = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    assert plain([{"role": "user", "content": [found, document]}])[0]["content"] == "T\nhttp://x\nfound\na\nb"


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
        ({"type": "tool_use", "id": "t", "name": "n", "input": [1]}, "input"),
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
    tools = [
        {"name": "a", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}},
        {"name": "b", "type": "custom", "input_schema": {"type": "object"}},
        {"name": "web_search", "type": "web_search_20250305"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    assert read([{"role": "user", "content": "x"}], tools=tools)[1].offered == [
        {"type": "function", "function": {"name": "a", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}},
    ]


SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
FETCH = {
    "name": "WebFetch",
    "description": "Gets a page",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}


def found(*names: str) -> list[dict[str, Any]]:
    """The result of a search."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": references}]}]


def test_a_deferred_tool_is_defined_where_it_was_found() -> None:
    """Once: the second reference is to a tool that the model has read already."""
    messages, tools = read(found("WebFetch", "WebFetch", "Nothing"), tools=[SEARCH, FETCH])
    assert tools.loaded == ["WebFetch"]
    assert [tool["function"]["name"] for tool in tools.offered] == ["ToolSearch", "WebFetch"]  # type: ignore[index]
    assert messages[0]["content"] == (
        "The tool WebFetch is available now, like those above:\n<tools>\n"
        '{"type": "function", "function": {"name": "WebFetch", "description": "Gets a page", "parameters": '
        '{"type": "object"}}}\n</tools>\nThe tool WebFetch is available.\nThe tool Nothing is not available.'
    )


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        ({"tools": [SEARCH, FETCH]}, ["ToolSearch"]),
        ({"tools": [FETCH]}, ["WebFetch"]),
        ({"tools": [SEARCH, FETCH], "tool_choice": {"type": "tool", "name": "WebFetch"}}, ["ToolSearch", "WebFetch"]),
        ({"tools": [SEARCH, FETCH, {"type": "tool_search_tool_regex_20251119", "name": "s"}]},
         ["ToolSearch", "WebFetch"]),
    ],
)  # fmt: skip
def test_a_deferred_tool_that_was_not_found_is_not_offered(
    fields: dict[str, Any], offered: list[str]
) -> None:
    """Unless nothing could find it, or the request asks for it."""
    _, tools = read([{"role": "user", "content": "x"}], **fields)
    assert [tool["function"]["name"] for tool in tools.offered] == offered  # type: ignore[index]
    assert tools.loaded == []
