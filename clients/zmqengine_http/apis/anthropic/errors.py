"""Refusals in Anthropic's shape, with the two sentences that Claude Code acts on.

Source: https://docs.anthropic.com/en/api/errors. Claude Code lowers max_tokens when it reads the first sentence, and
makes its conversation shorter when it reads the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.serving.errors import ApiError, ContextTooLong, from_engine

ROOM_MIN = 4000
"""Claude Code lowers max_tokens to no less than 3,000, and keeps 1,000 free besides."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    return msgspec.json.encode(error_document(error) | {"request_id": request_id})


@contextlib.contextmanager
def overloaded_as_529() -> Iterator[None]:
    """A refusal for want of a worker has the status that Anthropic's clients know for it."""
    try:
        yield
    except ZmqEngineError as error:
        raise _as_529(from_engine(error)) from None
    except ApiError as error:
        raise _as_529(error) from None


def _as_529(error: ApiError) -> ApiError:
    if error.status == 503:
        error.status = 529
    return error


def error_document(error: ApiError) -> dict[str, object]:
    """The same without the request's id, as it stands in a stream."""
    kind = _KINDS.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: ApiError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message
    if error.prompt >= error.context:
        return f"prompt is too long: {error.prompt} tokens > {error.context} maximum"
    room = error.context - error.prompt
    if room < ROOM_MIN and error.prompt > error.context // 2:
        # Asked to lower max_tokens, Claude Code would give up: it wants that much room. A shorter prompt has it.
        fits = max(error.context - min(error.wanted, ROOM_MIN), error.context // 2)
        return f"prompt is too long: {error.prompt} tokens > {fits} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.wanted} > {error.context}, "
        "decrease input length or `max_tokens` and try again"
    )
