"""Refusals in OpenAI's shape."""

from __future__ import annotations

import msgspec

from zmqengine_http.serving.errors import ApiError


def openai_error(error: ApiError, request_id: str) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )
