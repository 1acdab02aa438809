"""Errors as HTTP responses, with the statuses of OpenAI's API. Each API encodes the body in its own shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from zmqengine.protocol.printable import printable
from zmqengine_client import errors

DEFAULT_RETRY_AFTER_MS = 1000


class ApiError(Exception):
    """An error response. `final`: the server is at fault, and the same request would fail again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_ms: int | None = None,
        allow: str | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_ms = retry_after_ms
        self.allow = allow
        self.final = final

    def about(self, names: Mapping[str, str]) -> ApiError:
        """This refusal, with the name of its field that `names` has, if any."""
        field = re.split(r"\W", self.param or "", maxsplit=1)[0]
        if self.param and field in names:
            given = names[field]
            if self.message.startswith(field):
                self.message = given + self.message.removeprefix(field)
            self.param = given + self.param.removeprefix(field)
        return self

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response; Retry-After, in seconds and in milliseconds, if a retry may succeed."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_ms is not None:
            seconds = max(1, math.ceil(self.retry_after_ms / 1000))
            headers += [
                (b"retry-after", str(seconds).encode()),
                (b"retry-after-ms", str(self.retry_after_ms).encode()),
            ]
        if self.final:
            # The SDKs of OpenAI and Anthropic repeat a 503 otherwise.
            headers.append((b"x-should-retry", b"false"))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


ErrorShape = Callable[[ApiError, str], bytes]
"""Encodes the JSON body of an error; the second argument is the request's id."""


class ContextTooLong(ApiError):
    """A 400: prompt and requested output do not fit the context. Counts are tokens."""

    def __init__(self, param: str, *, prompt: int, wanted: int, context: int) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + wanted} "
            f"tokens ({prompt} in the {param}, {wanted} in the completion). Please reduce the length of the "
            f"{param} or of the completion.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt = prompt
        self.wanted = wanted
        self.context = context


def bad_field(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 that names the invalid field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def no_worker(model: str | None = None) -> ApiError:
    """A 503: no worker is ready, or none that serves `model`."""
    which = "worker" if model is None else f"worker of {model!r}"
    return ApiError(
        503,
        f"no {which} is ready; try again shortly",
        kind="service_unavailable_error",
        code="not_ready",
        retry_after_ms=DEFAULT_RETRY_AFTER_MS,
    )


class _Rule(NamedTuple):
    status: int
    kind: str
    code: str | None = None
    retry: bool = False
    final: bool = False


_INVALID = "invalid_request_error"
_BUSY = "service_unavailable_error"
_SERVER = "server_error"

# The first class that matches decides.
_RULES: tuple[tuple[type[errors.ZmqEngineError], _Rule], ...] = (
    (errors.TooLarge, _Rule(413, _INVALID)),
    (errors.ContextExceeded, _Rule(400, _INVALID, "context_length_exceeded")),
    (errors.Conflict, _Rule(500, _SERVER)),
    (errors.UnknownRequest, _Rule(500, _SERVER)),
    (errors.ConstraintFailed, _Rule(422, _INVALID, "constraint_failed")),
    (errors.UnknownModel, _Rule(404, _INVALID, "model_not_found")),
    (errors.RequestError, _Rule(400, _INVALID)),
    (errors.Overloaded, _Rule(429, "rate_limit_error", retry=True)),
    (errors.Unavailable, _Rule(503, _BUSY, retry=True)),
    (errors.SessionError, _Rule(503, _BUSY, retry=True)),
    (errors.AnswerTimeout, _Rule(503, _BUSY, retry=True)),
    (errors.DeadlineExceeded, _Rule(504, "timeout_error")),
    (errors.LeaseExpired, _Rule(503, _BUSY, retry=True)),
    (errors.ShutDown, _Rule(503, _BUSY, retry=True)),
    # Another machine may have the model: a gateway tries one after a 503.
    (errors.ModelLoadError, _Rule(503, _BUSY, final=True)),
    (errors.ZmqEngineError, _Rule(500, _SERVER)),
)


def from_engine(error: errors.ZmqEngineError) -> ApiError:
    """The HTTP form of an error of the client library or the worker."""
    rule = next(rule for cls, rule in _RULES if isinstance(error, cls))
    retry_after_ms = (error.retry_after_ms or DEFAULT_RETRY_AFTER_MS) if rule.retry else None
    message = error.message
    if isinstance(error, errors.Overloaded) and "acknowledge" in message:
        # The worker's advice to its session makes no sense to an HTTP client.
        message = "this server has as many requests as it may at once; try again shortly"
    return ApiError(
        rule.status,
        message,
        kind=rule.kind,
        param=_named_field(error.message) if rule.status == 400 else None,
        code=rule.code or error.code,
        retry_after_ms=retry_after_ms,
        final=rule.final,
    )


_PATH = re.compile(r" - at `(?P<key>key in )?\$(?P<path>[^`]*)`\Z")


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """A 400 with the path of the invalid value and the reason: `messages[0].content: expected str, got
    int`."""
    text = str(error)
    match = _PATH.search(text)
    reason = (text[: match.start()] if match else text).replace("`", "")
    path = match["path"].lstrip(".").replace("[...]", "") if match else ""
    named = re.search(r"(?:missing required|contains unknown) field (.+)", reason, re.DOTALL)
    if named:
        path = f"{path}.{named[1]}".lstrip(".")
    reason = printable(reason[:1].lower() + reason[1:])
    path = printable(path)
    return ApiError(
        400,
        f"{path}: {reason}" if path else reason,
        param=path or None,
        code=_fault(reason),
    )


def _fault(reason: str) -> str:
    signs = {
        "missing required field": "missing_required_parameter",
        "contains unknown field": "unknown_parameter",
        ", got ": "invalid_type",
    }
    return next((code for sign, code in signs.items() if sign in reason), "invalid_value")


def _named_field(message: str) -> str | None:
    match = re.search(r"`\$\.(?:sampling\.)?([a-z_]+)", message) or re.match(r"([a-z_]+):", message)
    return match[1] if match else None


def openai_error(error: ApiError, request_id: str) -> bytes:
    """OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )
