"""The error of a response that failed, with the codes that Codex tells apart."""

from __future__ import annotations

from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange

_CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded", 529: "server_is_overloaded"}


def failure(error: ApiError) -> dict[str, object]:
    """`code` and `message`; where waiting helps, the message says for how long, in the words that Codex reads."""
    code = error.code if error.code == "context_length_exceeded" else _CODES.get(error.status)
    if code is None:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
    message = error.message
    if error.retry_after_ms is not None:
        message = f"{message.rstrip('.')}. Please try again in {error.retry_after_ms / 1000:g}s."
    return {"code": code, "message": message}


def tells_by_event(exchange: Exchange, error: ApiError) -> bool:
    """Whether a refusal of a stream is better told as its one event than by a status.

    Codex, which says `originator`, acts on the codes of a response that failed: it makes its conversation shorter, or
    waits and tries again. Of a 400 it shows the text, and a 429 it does not try again. Other clients want the status.
    """
    known = error.code == "context_length_exceeded" or error.status in _CODES
    return known and exchange.header(b"originator") is not None
