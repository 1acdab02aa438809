"""The events and bodies of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.http.agents.sse import events, types
from zmqengine_http.answers.answer_events import (
    CallArguments,
    CallStarted,
    CompleteCall,
    Finish,
    Start,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.apis.responses.items import unpack
from zmqengine_http.apis.responses.request import ResponsesTool
from zmqengine_http.apis.responses.tools import ToolBook
from zmqengine_http.apis.responses.writer import ReasoningShape, ResponsesWriter
from zmqengine_http.serving.errors import ApiError, ContextTooLong

USAGE = Usage(prompt=100, cached=60, completion=7, reasoning=3)
COUNTS = {
    "input_tokens": 100, "input_tokens_details": {"cached_tokens": 60},
    "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 107,
}  # fmt: skip
TOOLS = [
    {"type": "namespace", "name": "mcp__f", "tools": [{"type": "function", "name": "read"}]},
    {"type": "custom", "name": "patch"},
]


def writer(**shape: bool) -> ResponsesWriter:
    book = ToolBook(msgspec.convert(TOOLS, list[ResponsesTool]))
    return ResponsesWriter("resp_1", {"model": "m"}, book, ReasoningShape(**shape))


def call(w: ResponsesWriter, place: int, name: str, *pieces: str) -> bytes:
    data = w.call_started(0, CallStarted(place, f"call_{place}", name), None)
    for piece in pieces:
        data += w.call_arguments(0, CallArguments(place, piece))
    return data + w.call_ended(0, place)


def a_stream(w: ResponsesWriter) -> bytes:
    data = w.opening(0, Start(100, 60)) + w.text(0, Text("reasoning", "h"), None)
    data += w.text(0, Text("reasoning", "m"), None) + w.text(0, Text("content", "I \u00e9"), None)
    data += call(w, 0, "mcp__f__read", '{"p":', "1}") + call(w, 1, "patch", '{"inp', 'ut":"*** x"}')
    return data + w.closing(0, Finish("tool_calls"), None) + w.done(USAGE)


def test_every_event_comes_in_order_with_its_indices() -> None:
    """Reasoning, a message, a function call and a freeform call, and the whole response at the end."""
    data = a_stream(writer())
    assert types(data) == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
        "response.output_item.added", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    found = events(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
    for event in found:
        if "item_id" in event:
            assert event["item_id"] == added[event["output_index"]]
        if event["type"].startswith(
            ("response.output_text", "response.reasoning_text", "response.content_part")
        ):
            assert event["content_index"] == 0
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    response = found[-1]["response"]
    assert response["output"] == done
    assert (response["status"], response["usage"]) == ("completed", COUNTS)
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert done[1]["content"][0]["text"] == "I \u00e9"
    assert (done[2]["name"], done[2]["namespace"], done[2]["arguments"]) == ("read", "mcp__f", '{"p":1}')
    assert (done[3]["type"], done[3]["name"], done[3]["input"]) == ("custom_tool_call", "patch", "*** x")


def test_whole_and_streamed_say_the_same() -> None:
    """But for the ids of the items."""
    calls = [
        CompleteCall("call_0", "mcp__f__read", '{"p":1}'),
        CompleteCall("call_1", "patch", '{"input":"*** x"}'),
    ]
    choice = WholeChoice(0, Finish("tool_calls"), "I \u00e9", "hm", calls, None)
    whole = json.loads(writer().whole([choice], USAGE))
    streamed = events(a_stream(writer()))[-1]["response"]

    def without_ids(response: dict[str, Any]) -> dict[str, Any]:
        for item in response["output"]:
            del item["id"]
        return response | {"created_at": 0}

    assert without_ids(whole) == without_ids(streamed)


def test_a_summary_is_told_as_one_and_packed_for_the_way_back() -> None:
    """Clients that ask for a summary show nothing else; Codex sends back nothing but the packed form."""
    w = writer(summary=True, packed=True)
    data = w.opening(0, Start(1, 0)) + w.text(0, Text("reasoning", "hm"), None)
    data += w.closing(0, Finish("stop"), None) + w.done(USAGE)
    assert types(data)[3:7] == [
        "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done", "response.reasoning_summary_part.done",
    ]  # fmt: skip
    (item,) = events(data)[-1]["response"]["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert unpack(item["encrypted_content"]) == "hm"


def test_a_cut_answer_is_incomplete() -> None:
    """The item it was cut in, and the response."""
    w = writer()
    data = w.opening(0, Start(1, 0)) + w.text(0, Text("content", "x"), None)
    data += w.closing(0, Finish("length"), None) + w.done(USAGE)
    last = events(data)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    choice = WholeChoice(0, Finish("length"), "x", "", [], None)
    whole = json.loads(writer().whole([choice], USAGE))
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_long_prompt_is_waited_for_with_real_events() -> None:
    """Comments do not count for Codex's patience; created comes once."""
    w = writer()
    data = w.keepalive() + w.keepalive() + w.opening(0, Start(1, 0)) + w.closing(0, Finish("stop"), None)
    names = [event["type"] for event in events(data + w.done(USAGE))]
    assert names == [
        "response.created", "response.in_progress", "response.in_progress", "response.completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            ContextTooLong("input", prompt=9, wanted=1, context=8),
            "context_length_exceeded",
            "maximum context",
        ),
        (ApiError(429, "the queue is full", retry_after_ms=1500), "rate_limit_exceeded", "try again in 1.5s"),
        (ApiError(503, "no worker", retry_after_ms=1000), "server_is_overloaded", "try again in 1s"),
        (ApiError(500, "internal error"), "server_error", "internal"),
        (ApiError(400, "bad"), "invalid_prompt", "bad"),
    ],
)
def test_a_failure_has_the_code_that_codex_knows(error: ApiError, code: str, words: str) -> None:
    """Also before anything else was sent."""
    created, _, failed = events(writer().error(error))
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == code
    assert words in failed["response"]["error"]["message"]
