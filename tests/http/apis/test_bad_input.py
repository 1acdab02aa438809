"""Every way a request can be wrong: the right status, the field named, and everyone else undisturbed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, Reply, call, chat, get, post, serving
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    with serving(HttpConfig(workers=(worker.address,), body_bytes_max=100_000, choices_max=8)) as front:
        yield front


@pytest.fixture(scope="module", autouse=True)
def others(front: Front) -> Iterator[None]:
    """Somebody else's request, again and again while the bad ones come: it must always be answered alike."""
    done = threading.Event()
    answers: list[Any] = []

    def ask() -> None:
        while not done.is_set():
            answers.append(post(front, CHAT, chat(seed=1, max_tokens=20)).json["choices"])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join(60)
    assert len(answers) > 10
    assert all(answer == answers[0] for answer in answers)


# What the field's servers were asked, and more of the kind: fields beside a good message, the field to be named.
CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 5}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"stop": 4}, "stop"),
    ({"stop": [4]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"not a number": 1}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"priority": 101}, "priority"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "static", "content": "x"}}, "prediction.type"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"colour": "red"}, "colour"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[1].content[0]",
    ),
]  # fmt: skip
TEXT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": [2**40]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1] * 4080 + [2] * 800}, "prompt"),
    ({"prompt": [[1]] * 9}, "n"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": [5], "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
    ({"prompt": "ab", "echo": True, "logprobs": 1, "guided_regex": "a"}, "echo"),
    ({"prompt": "ab", "echo": True, "logprobs": 1, "suffix": "a"}, "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "messages": []}, "messages"),
    ({}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_chat_field_is_a_400_that_names_it(front: Front, fields: dict[str, Any], param: str) -> None:
    """vllm-mlx #799, ollama #17183, mlx-lm #1007: parameters accepted and ignored; here honoured or refused by name.

    mlx_lm.server: `stop: 4` killed the generation thread; mlx-lm: a logit_bias id outside the vocabulary crashed it.
    """
    check_400(post(front, CHAT, chat(**fields)), param)


@pytest.mark.parametrize(("fields", "param"), TEXT_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_completion_field_is_a_400_that_names_it(
    front: Front, fields: dict[str, Any], param: str
) -> None:
    """smg servicer 0.14.1 and mlx_lm.server 0.32.2: an empty prompt stopped everybody."""
    check_400(post(front, TEXT, fields), param)


def check_400(reply: Reply, param: str) -> None:
    assert reply.status == 400, reply.body
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["code"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b'"text"', b'{"messages": [', b"\xff\xfe", b'{"messages": "\xff"}',
        b"not json",
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b"[" * 50_000, b'{"a":' * 10_000, b'{"x": "\\ud800"',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_a_400(front: Front, path: str, body: bytes) -> None:
    """Cut short, of the wrong kind, not UTF-8, nested without end, or NaN, which JSON does not have."""
    reply = call(front, "POST", path, body)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_json"


def test_odd_text_is_text(front: Front) -> None:
    """Nulls, noncharacters, halves of pairs and escapes in a message are read or refused, never a 500."""
    for text in ("\x00", "\uffff\ufffe", "\u202e", "a" * 3000, "{{ 7*7 }}{% for %}", "<end>"):
        assert post(front, CHAT, chat(text, max_tokens=1)).status == 200
    lone = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    assert call(front, "POST", CHAT, lone).status in (200, 400)


def test_values_that_only_look_odd_are_honoured(front: Front) -> None:
    """What OpenAI takes is taken."""
    good: list[dict[str, Any]] = [
        {"seed": -1}, {"top_p": 0}, {"top_k": -1}, {"n": 2}, {"temperature": 0}, {"stop": []}, {"logit_bias": {}},
        {"max_completion_tokens": 3}, {"tools": []}, {"response_format": {"type": "text"}}, {"tool_choice": "auto"},
        {"modalities": ["text"]}, {"model": "fake"}, {"verbosity": "medium"}, {"deadline_ms": 60_000}, {"priority": -3},
    ]  # fmt: skip
    for fields in good:
        assert post(front, CHAT, chat(**{"max_tokens": 3, **fields})).status == 200, fields


def test_tokenize_checks_what_a_chat_checks(front: Front) -> None:
    """The same messages, tools and template variables, with the same refusals."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[1].tool_calls[0].function",
        ),
        ({"messages": [USER], "tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"messages": [USER], "prompt": "both"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "colour": 1}, "colour"),
        ({"prompt": 5}, "prompt"),
    ]
    for body, param in bad:
        check_400(post(front, "/tokenize", body), param)


def test_an_unknown_model_is_a_404(front: Front) -> None:
    """With the code that client libraries look for."""
    for path, body in ((CHAT, chat(model="gpt-99")), (TEXT, {"prompt": "a", "model": "gpt-99"})):
        reply = post(front, path, body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert get(front, "/v1/models/org/name").status == 404


def test_unknown_paths_and_methods_are_answered_in_shape(front: Front) -> None:
    """404 and 405, as JSON."""
    assert get(front, "/v2/chat").error["code"] == "unknown_url"
    reply = get(front, CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error["code"] == "method_not_allowed"


def test_a_body_over_the_bound_is_a_413(front: Front) -> None:
    """Declared or chunked, it is refused before it is read to the end."""
    reply = call(front, "POST", CHAT, b"x" * 100_001)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(12):
            connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_no_http_ends_that_connection_alone(front: Front, raw: bytes) -> None:
    """The server says so, or hangs up, and serves on."""
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
        connection.sendall(raw)
        assert connection.recv(100)[:12] in (b"", b"HTTP/1.1 400")
    assert get(front, "/health").status == 200
