"""From the bytes of a body to a checked request. Every refusal is a 400 that names the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from zmqengine.protocol.messages import TOKEN_ID_MAX
from zmqengine_http import fields
from zmqengine_http.errors import ApiError, bad_field, from_validation
from zmqengine_http.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

T = TypeVar("T")


def read_chat(data: bytes) -> ChatRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    body = fields.accept("chat", _object(data))
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_without_nulls(message) for message in messages]
    request = _convert(body, ChatRequest)
    _check_chat(request)
    return request


def read_completion(data: bytes) -> CompletionRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    request = _convert(fields.accept("completions", _object(data)), CompletionRequest)
    _check_common(request)
    return request


def read_tokenize(data: bytes) -> TokenizeRequest:
    """The request in a body, with either a prompt or messages. Raises a 400 that names the field at fault."""
    body = {name: value for name, value in _object(data).items() if value is not None}
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_without_nulls(message) for message in messages]
    request = _convert(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    return request


def read_detokenize(data: bytes) -> DetokenizeRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    return _convert({k: v for k, v in _object(data).items() if v is not None}, DetokenizeRequest)


def _object(data: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _convert(body: dict[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def _without_nulls(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _check_chat(request: ChatRequest) -> None:
    _check_common(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_field("max_tokens", "max_completion_tokens is given too, with another value")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    if request.tool_choice not in ("none", "auto"):
        raise bad_field(
            "tool_choice",
            "only none and auto are supported: there is no constrained output yet",
            code="unsupported_value",
        )
    kind = request.response_format.get("type", "text")
    if kind != "text" or request.response_format.keys() - {"type"}:
        raise bad_field(
            "response_format", 'only {"type": "text"} is supported: there is no constrained output yet',
            code="unsupported_value",
        )  # fmt: skip
    for place, tool in enumerate(request.tools):
        if tool.function.strict:
            raise bad_field(
                f"tools[{place}].function.strict",
                "there is no constrained output yet",
                code="unsupported_value",
            )


def _check_common(request: CommonRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "needs stream to be true")
    for key in request.logit_bias:
        if not key.isascii() or not key.isdigit() or int(key[:12]) > TOKEN_ID_MAX:
            raise bad_field("logit_bias", f"{key[:40]!r} is no token id")
