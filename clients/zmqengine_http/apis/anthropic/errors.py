"""Errors in Anthropic's shape, with the two messages that Claude Code parses.

Source: https://docs.anthropic.com/en/api/errors. On "exceed context limit" Claude Code lowers max_tokens, on
"prompt is too long" it compacts its conversation.
"""

from __future__ import annotations

import msgspec

from zmqengine_http.serving.errors import ApiError, ContextTooLong

ROOM_MIN = 4000
"""Claude Code lowers max_tokens to no less than 3,000, and keeps 1,000 free besides."""
OVERLOADED_STATUS = 529
"""The status that Anthropic's clients know for the lack of a ready worker."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """Anthropic's error body: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    return msgspec.json.encode(error_document(error) | {"request_id": request_id})


def error_document(error: ApiError) -> dict[str, object]:
    """The error as a document without the request id, as it appears in a stream."""
    kind = (None if error.final else _KINDS.get(error.status)) or (
        "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: ApiError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message
    if error.prompt >= error.context:
        return f"prompt is too long: {error.prompt} tokens > {error.context} maximum"
    room = error.context - error.prompt
    if room < ROOM_MIN and error.prompt > error.context // 2:
        # Below ROOM_MIN Claude Code gives up instead of lowering max_tokens. A shorter prompt leaves enough
        # room.
        fits = max(error.context - min(error.wanted, ROOM_MIN), error.context // 2)
        return f"prompt is too long: {error.prompt} tokens > {fits} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.wanted} > {error.context}, "
        "decrease input length or `max_tokens` and try again"
    )
