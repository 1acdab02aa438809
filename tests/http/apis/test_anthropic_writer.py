"""The events and bodies of the Messages API."""

from __future__ import annotations

import json

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
from zmqengine_http.apis.anthropic.errors import anthropic_error
from zmqengine_http.apis.anthropic.writer import MessagesWriter
from zmqengine_http.serving.errors import ApiError, ContextTooLong

NO_THINKING = {"thinking_tokens": 0}
USAGE = Usage(prompt=100, cached=60, completion=7, reasoning=2)
COUNTS = {"input_tokens": 40, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 60}


def writer() -> MessagesWriter:
    return MessagesWriter("msg_1", "m", 100)


def test_all_events_come_in_order_with_real_counts_in_the_first() -> None:
    """Thinking, text and a call are three blocks, each closed before the next."""
    w = writer()
    data = w.opening(0, Start(100, 60))
    data += w.text(0, Text("reasoning", "hm"), None) + w.text(0, Text("reasoning", "m"), None)
    data += w.text(0, Text("content", "I \u00e9"), None)
    data += w.call_started(0, CallStarted(0, "call_1", "add"), None)
    data += w.call_arguments(0, CallArguments(0, '{"a":')) + w.call_arguments(0, CallArguments(0, "1}"))
    data += w.call_ended(0, 0) + w.closing(0, Finish("tool_calls"), None) + w.done(USAGE)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert types(data) == ["message_start", *block * 3, "message_delta", "message_stop"]
    found = events(data)
    message = found[0]["message"]
    assert message["usage"] == {**COUNTS, "output_tokens": 0, "output_tokens_details": NO_THINKING}
    assert (message["id"], message["role"], message["content"], message["stop_reason"]) == (
        "msg_1", "assistant", [], None,
    )  # fmt: skip
    assert [e["index"] for e in found if "index" in e] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    deltas = [e["delta"] for e in found if e["type"] == "content_block_delta"]
    assert [d["type"] for d in deltas] == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
        "input_json_delta",
    ]  # fmt: skip
    assert deltas[2]["signature"]
    assert deltas[3]["text"] == "I \u00e9"
    assert "".join(d.get("partial_json", "") for d in deltas) == '{"a":1}'
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {
        **COUNTS,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop"), "end_turn", None),
        (Finish("length"), "max_tokens", None),
        (Finish("tool_calls"), "tool_use", None),
        (Finish("stop", stop_string="END"), "stop_sequence", "END"),
    ],
)
def test_why_it_ended_is_told_streamed_and_whole(finish: Finish, reason: str, sequence: str | None) -> None:
    """In Anthropic's four words."""
    w = writer()
    delta = events(w.opening(0, Start(1, 0)) + w.closing(0, finish, None) + w.done(USAGE))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)
    whole = json.loads(writer().whole([WholeChoice(0, finish, "x", "", [], None)], USAGE))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_a_ping_may_come_first_and_starts_the_message_once() -> None:
    """A long prompt is read for minutes; a client gives up what says nothing."""
    w = writer()
    data = w.keepalive() + w.keepalive() + w.opening(0, Start(100, 60))
    data += (
        w.text(0, Text("content", "x"), None)
        + w.keepalive()
        + w.closing(0, Finish("stop"), None)
        + w.done(USAGE)
    )
    assert types(data) == [
        "message_start", "ping", "content_block_start", "content_block_delta", "ping", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events(data)[0]["message"]["usage"]["input_tokens"] == 100
    assert events(data)[-2]["usage"]["cache_read_input_tokens"] == 60


def test_a_whole_message_has_the_same_blocks() -> None:
    """A call that was cut short has the input that could be read."""
    calls = [CompleteCall("c1", "add", '{"a":1}'), CompleteCall("c2", "add", '{"a":')]
    whole = json.loads(writer().whole([WholeChoice(0, Finish("length"), "t", "r", calls, None)], USAGE))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2] == {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    assert whole["content"][3]["input"] == {}
    assert (whole["type"], whole["usage"]) == (
        "message",
        {**COUNTS, "output_tokens": 7, "output_tokens_details": {"thinking_tokens": 2}},
    )


def test_an_error_within_a_stream_is_an_event() -> None:
    """In the shape of a refusal."""
    (event,) = events(writer().error(ApiError(503, "gone", retry_after_ms=500)))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ContextTooLong("messages", prompt=25000, wanted=32000, context=40960),
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 25000 + 32000 > 40960, decrease input length or "
            "`max_tokens` and try again",
        ),
        (
            ContextTooLong("messages", prompt=50000, wanted=1, context=40960),
            "invalid_request_error",
            "prompt is too long: 50000 tokens > 40960 maximum",
        ),
        (
            ContextTooLong("messages", prompt=38000, wanted=32000, context=40960),
            "invalid_request_error",
            "prompt is too long: 38000 tokens > 36960 maximum",
        ),
        (
            ContextTooLong("messages", prompt=30, wanted=4096, context=2048),
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 30 + 4096 > 2048, decrease input length or "
            "`max_tokens` and try again",
        ),
        (ApiError(401, "no"), "authentication_error", "no"),
        (ApiError(404, "no"), "not_found_error", "no"),
        (ApiError(405, "no"), "invalid_request_error", "no"),
        (ApiError(413, "no"), "request_too_large", "no"),
        (ApiError(429, "no"), "rate_limit_error", "no"),
        (ApiError(500, "no"), "api_error", "no"),
        (ApiError(504, "no"), "timeout_error", "no"),
    ],
)
def test_refusals_have_the_shape_and_the_sentences_that_clients_act_on(
    error: ApiError, kind: str, message: str
) -> None:
    """Claude Code lowers max_tokens after the first and compacts after the second, and after no other words."""
    assert json.loads(anthropic_error(error, "req_1")) == {
        "type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1",
    }  # fmt: skip
