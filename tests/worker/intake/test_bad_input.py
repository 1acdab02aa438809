"""Bad input gets its documented error, the worker serves on, and other streams do not change by a token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from tests.worker.harness import FrontEnd, Harness, row_of
from zmqengine.engine.fake.fake_engine import expected_tokens
from zmqengine.protocol.messages import Insert, Rejected


@pytest.fixture
def beside_a_stream(harness: Harness) -> Iterator[FrontEnd]:
    """A front-end that misbehaves while another one streams; the other's tokens are compared at the end."""
    other = harness.front_end()
    insert: Insert = other.insert_message("good", max_tokens=600)
    other.call(insert)
    yield harness.front_end()
    other.wait_for_end("good")
    assert other.tokens["good"] == expected_tokens(row_of(insert))
    assert harness.actor.counters.engine_failures == 0


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"prompt": [1000]}, "bad_request", "prompt"),
        ({"prompt": [2**31 - 1]}, "bad_request", "prompt"),
        ({"prompt": []}, "bad_request", "prompt"),
        ({"emitted": [1000]}, "bad_request", "emitted"),
        ({"stop_token_ids": [99999]}, "bad_request", "stop_token_ids"),
        ({"sampling": {"logit_bias": {1000: 1.0}}}, "bad_request", "logit_bias"),
        ({"sampling": {"logit_bias": {999999: 1.0}}}, "bad_request", "logit_bias"),
        ({"sampling": {"logit_bias": {-1: 1.0}}}, "bad_request", "logit_bias"),
        ({"sampling": {"temperature": float("nan")}}, "bad_request", "temperature"),
        ({"sampling": {"temperature": float("inf")}}, "bad_request", "temperature"),
        ({"sampling": {"temperature": -1}}, "bad_request", "temperature"),
        ({"sampling": {"top_p": 5}}, "bad_request", "top_p"),
        ({"sampling": {"top_k": -5}}, "bad_request", "top_k"),
        ({"sampling": {"tempature": 1}}, "bad_request", "tempature"),
        ({"sampling": {"min_tokens": 21}, "max_tokens": 20}, "bad_request", "min_tokens"),
        ({"sampling": {"logit_bias": {"a": 1}}}, "bad_request", "logit_bias"),
        ({"prediction": [1000]}, "bad_request", "prediction"),
        ({"constraint": {"kind": "json", "after": [1000]}}, "bad_request", "constraint.after"),
        ({"constraint": {"kind": "json", "after": [1, 2**31 - 1]}}, "bad_request", "constraint.after"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_tokens": -1}, "bad_request", "max_tokens"),
        ({"max_tokens": 10**9}, "context_exceeded", "max_tokens"),
        ({"prompt": [1] * 4096}, "context_exceeded", "context"),
        ({"prompt": [1] * 1_000_000}, "context_exceeded", "context"),
        ({"seed": -1}, "bad_request", "seed"),
        ({"seed": 2**64 - 1}, "bad_request", "seed"),
        ({"logprobs": 21}, "bad_request", "logprobs"),
        ({"stop_token_ids": 4}, "bad_request", "stop_token_ids"),
        ({"priority": 101}, "bad_request", "priority"),
        ({"deadline_ms": 0}, "bad_request", "deadline_ms"),
        ({"request": ""}, "bad_request", "request"),
        ({"request": "x" * 65}, "bad_request", "request"),
        ({"colour": "red"}, "bad_request", "colour"),
        ({"epoch": b"short"}, "bad_request", "epoch"),
    ],
)
def test_a_bad_field_is_refused_by_name(
    beside_a_stream: FrontEnd, fields: dict[str, Any], code: str, named: str
) -> None:
    """vllm-mlx #799, ollama #17183, mlx-lm #1007: honoured or refused. mlx-lm 0.32.2, measured: an id outside the
    vocabulary crashed the process. mlx_lm.server 0.32.2, measured: an empty prompt killed the thread for good."""
    body = {
        "call": 7,
        "request": "bad",
        "epoch": beside_a_stream.epoch,
        "prompt": [1],
        "max_tokens": 8,
    } | fields
    beside_a_stream.send_raw(b"ZE1I", msgpack.packb(body))
    reply = beside_a_stream.next_reply()
    assert isinstance(reply, Rejected)
    assert (reply.code, reply.call) == (code, 7)
    assert named in reply.message
    beside_a_stream.accepted("good after bad", max_tokens=3)
    beside_a_stream.wait_for_end("good after bad")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"XX1I", b"\x80"], "bad_request"),
        ([b"ZE2I", b"\x80"], "unsupported_protocol"),
        ([b"ZE1?", b"\x80"], "bad_request"),
        ([b"ZE1t", b"\x80"], "bad_request"),
        ([b"ZE1I"], "bad_request"),
        ([b"ZE1I", b"\x80", b"more"], "bad_request"),
        ([b"", b""], "bad_request"),
        ([b"ZE1I", b""], "bad_request"),
        ([b"ZE1I", b"\x81\xa4call"], "bad_request"),
        ([b"ZE1I", b"\x81\xa6prompt\xdd\xff\xff\xff\xff"], "bad_request"),
        ([b"ZE1P", b"\x81\xa4zzzz" + b"\x91" * 100_000 + b"\x01"], "bad_request"),
        ([b"ZE1P", os.urandom(100)], "bad_request"),
        ([b"ZE1P", b"\xc7\x04\x01abcd"], "bad_request"),
        ([b"ZE1I", b"\x81\xa7request\xa3\xff\xfe\xfd"], "bad_request"),
    ],
)
def test_hostile_bytes_are_refused(beside_a_stream: FrontEnd, frames: list[bytes], code: str) -> None:
    """Wrong magic, another version, truncated, length bombs, deep nesting, ext types, bad UTF-8."""
    beside_a_stream.send_raw(*frames)
    reply = beside_a_stream.next_reply()
    assert isinstance(reply, Rejected)
    assert reply.code == code


def test_an_oversized_body_is_refused(make_harness: Any) -> None:
    """Over the frame limit: too_large, and the connection stays."""
    harness = make_harness(frame_bytes_max=4096)
    front_end = harness.front_end()
    refused = front_end.rejected("r", [1] * 5000, max_tokens=1)
    assert refused.code == "too_large"
    front_end.accepted("r")
    front_end.wait_for_end("r")
