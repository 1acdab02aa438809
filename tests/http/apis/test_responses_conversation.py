"""The items and tools of a Responses request as chat templates read them."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from zmqengine_http.apis.responses.conversation import InputItems
from zmqengine_http.apis.responses.items import pack, unpack
from zmqengine_http.apis.responses.request import ResponsesRequest, ResponsesTool
from zmqengine_http.apis.responses.response_memory import ItemMemory
from zmqengine_http.apis.responses.tools import ToolBook, tool_choice
from zmqengine_http.serving.errors import ApiError


def read(items: object, **fields: Any) -> InputItems:
    return InputItems(msgspec.convert({"input": items, **fields}, ResponsesRequest))


def book(*tools: dict[str, Any]) -> ToolBook:
    return ToolBook(msgspec.convert(tools, list[ResponsesTool]))


def call(id_: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_what_the_user_says() -> None:
    """With the instructions before it."""
    assert read("hi", instructions="be brief").messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_what_one_turn_made_is_one_assistant_message() -> None:
    """Reasoning, text and calls come as items of their own and were one answer."""
    made = read(
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"role": "user", "content": "go"},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": pack("h\u00e9")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"p": 1}'},
            {
                "type": "function_call",
                "call_id": "2",
                "name": "read",
                "namespace": "mcp__files",
                "arguments": "{",
            },
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "y"}, {"type": "input_text", "text": "z"}],
            },
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "so"}],
                "encrypted_content": None,
            },
            {"type": "custom_tool_call", "call_id": "3", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "3", "output": "done"},
        ]
    )
    assert made.messages == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "h\u00e9",
            "tool_calls": [call("1", "look", {"p": 1}), call("2", "mcp__files__read", {"arguments": "{"})],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y\nz"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [call("3", "patch", {"input": "*** Begin"})],
        },
        {"role": "tool", "tool_call_id": "3", "content": "done"},
    ]
    assert not made.skipped


def test_reasoning_begins_the_next_turn() -> None:
    """Two answers without anybody between them stay two."""
    item = {"type": "message", "role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []}
    made = read([thought, item, thought, item]).messages
    assert made == [{"role": "assistant", "content": "a", "reasoning_content": "t"}] * 2


def test_images_of_tools_and_of_earlier_turns_are_told_in_words() -> None:
    """Codex sends them again with each turn, and after a resume: a refusal would end its session."""
    image = {"type": "input_image", "image_url": "data:"}
    seen = "[an image, which this model cannot see: it reads text only]"
    items: list[dict[str, object]] = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]
    for further in ([], [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "say hello"}]):
        made = read([*items, *further]).messages
        assert made[0]["content"] == f"{seen}look"
        assert made[2]["content"] == seen


def test_items_of_other_servers_and_unknown_ones_are_skipped_and_told() -> None:
    """Codex adds types with every release."""
    made = read(
        [
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
            {"type": "local_shell_call", "call_id": "l", "action": {}},
            {"type": "compaction", "encrypted_content": "x"},
            {"type": "brand_new", "content": {"any": "thing"}, "output": 3},
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
            {"role": "user", "content": "hi"},
        ]
    )
    assert made.messages == [{"role": "user", "content": "hi"}]
    assert made.skipped == [
        "web_search_call",
        "local_shell_call",
        "compaction",
        "brand_new",
        "computer_call_output",
    ]


@pytest.mark.parametrize(
    ("item", "param", "word"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            "input[0].content[0]",
            "image",
        ),
        ({"type": "item_reference", "id": "msg_1"}, "input[0]", "no item"),
        ({"type": "function_call", "arguments": "{}"}, "input[0]", "call_id"),
        ({"role": "critic", "content": "x"}, "input[0].role", "one of"),
        ({"type": "input_image", "image_url": "data:"}, "input[0].type", "in the content of"),
        (
            {"type": "computer_call_output", "output": {}},
            "input[0].type",
            "'computer_call_output' is the result",
        ),
        ({"role": "user", "content": 3}, "input[0].content", "list of parts"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(item: dict[str, object], param: str, word: str) -> None:
    """Rather than answered without it."""
    with pytest.raises(ApiError, match=word) as refused:
        read([item])
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("packed", ["gAAAA-of-another-server", "zmqr1.!!", "zmqr1.AAAA", ""])
def test_only_what_was_packed_here_is_unpacked(packed: str) -> None:
    """Another server's is truly encrypted."""
    assert unpack(packed) is None


def test_namespaces_are_flattened_and_given_back() -> None:
    """The tools of MCP servers; without the namespace Codex cannot find them again."""
    functions = [
        {
            "type": "function",
            "name": "read",
            "description": "d",
            "strict": False,
            "parameters": {"type": "object"},
        }
    ]
    tools = book(
        {"type": "namespace", "name": "mcp__files", "tools": functions},
        {"type": "namespace", "name": "mcp__web__", "tools": functions},
        {"type": "function", "name": "read"},
    )
    names = [tool["function"]["name"] for tool in tools.plain]  # type: ignore[index]
    assert names == ["mcp__files__read", "mcp__web__read", "read"]
    assert tools.find("mcp__files__read")[:2] == ("read", "mcp__files")
    assert tools.find("mcp__web__read")[:2] == ("read", "mcp__web__")
    assert tools.find("read")[:2] == ("read", None)
    assert tools.find("unheard_of")[:2] == ("unheard_of", None)


def test_freeform_tools_take_one_text_and_hosted_ones_are_skipped() -> None:
    """The grammar of a freeform tool goes into its description."""
    tools = book(
        {
            "type": "custom",
            "name": "patch",
            "description": "d",
            "format": {"type": "grammar", "definition": "start: x"},
        },
        {"type": "web_search"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search"},
    )
    assert tools.skipped == ["web_search", "image_generation", "tool_search"]
    (function,) = [tool["function"] for tool in tools.plain]
    assert "start: x" in function["description"]  # type: ignore[index]
    assert tools.find("patch").kind == "custom"


def test_a_tool_without_a_name_is_refused() -> None:
    """At its place."""
    with pytest.raises(ApiError) as refused:
        book({"type": "function", "name": "ok"}, {"type": "function"})
    assert refused.value.param == "tools[1].name"


def test_the_choice_of_tools_becomes_that_of_chat() -> None:
    """Allowed tools narrow the list; a hosted tool cannot be chosen."""
    tools = book({"name": "a"}, {"name": "b"})
    assert tool_choice("auto", tools) == "auto"
    assert tool_choice({"type": "function", "name": "a"}, tools) == {
        "type": "function",
        "function": {"name": "a"},
    }
    allowed: dict[str, object] = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "b"}],
    }
    assert tool_choice(allowed, tools) == "auto"
    assert [tool["function"]["name"] for tool in tools.plain] == ["b"]  # type: ignore[index]
    with pytest.raises(ApiError, match="web_search"):
        tool_choice({"type": "web_search"}, tools)


def test_an_item_is_referred_to_once() -> None:
    """As OpenAI has it: a short body must not make a long text many times."""
    memory = ItemMemory()
    memory.remember("a", {"id": "msg_1", "type": "message", "role": "user", "content": "x" * 1000})
    reference = {"type": "item_reference", "id": "msg_1"}
    once, twice = (msgspec.convert({"input": [reference] * times}, ResponsesRequest) for times in (1, 2))
    assert len(InputItems(once, partial(memory.find, "a")).messages) == 1
    with pytest.raises(ApiError, match="duplicate item 'msg_1'") as refused:
        InputItems(twice, partial(memory.find, "a"))
    assert (refused.value.status, refused.value.param) == (400, "input[1]")


def test_the_memory_of_items_is_bounded() -> None:
    """By bytes; the oldest go first."""
    memory = ItemMemory(bytes_max=1000)
    for number in range(10):
        memory.remember("a", {"id": f"msg_{number}", "type": "message", "content": "x" * 300})
    assert memory.find("a", "msg_9") is not None
    assert memory.find("a", "msg_0") is None
    assert memory.find("b", "msg_9") is None
