"""The frame around the choices of OpenAI's responses, encoded once per request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from zmqengine_http.answers.answer_events import Usage
from zmqengine_http.serving.errors import ApiError, openai_error

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "zmqengine"


class Frame:
    """The constant parts of one response's events, and the body of a response that is not streamed.

    `kind` is the `object` of an event, `whole_kind` that of a whole response. With `include_usage` every
    event has a `usage`, null except in the last.
    """

    def __init__(self, id_: str, kind: str, whole_kind: str, model: str, *, include_usage: bool) -> None:
        self._head = {"id": id_, "object": kind, "created": int(time.time()), "model": model}
        self._whole_kind = whole_kind
        self._include_usage = include_usage
        head = msgspec.json.encode({**self._head, "system_fingerprint": FINGERPRINT})
        self.before = b"data: " + head[:-1] + b","
        self.after = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def event(self, choices: Sequence[object]) -> bytes:
        return self.before + b'"choices":' + msgspec.json.encode(choices) + self.after

    def done(self, usage: Usage) -> bytes:
        """The end of the stream, after the usage if `include_usage`."""
        if not self._include_usage:
            return DONE
        return (
            self.before
            + b'"choices":[],"usage":'
            + msgspec.json.encode(usage_document(usage))
            + b"}\n\n"
            + DONE
        )

    def error(self, error: ApiError) -> bytes:
        """The error event, which ends a stream without `[DONE]`."""
        return b"data: " + openai_error(error, "") + b"\n\n"

    def whole(self, choices: Sequence[object], usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        return msgspec.json.encode(
            {
                **self._head, "object": self._whole_kind, "choices": choices,
                "usage": usage_document(usage), "system_fingerprint": FINGERPRINT,
            }
        )  # fmt: skip


def usage_document(usage: Usage) -> dict[str, object]:
    """Token counts in OpenAI's shape."""
    drafts = {
        "accepted_prediction_tokens": usage.drafted_accepted,
        "rejected_prediction_tokens": usage.drafted - usage.drafted_accepted,
    }
    if not usage.drafted:
        drafts = {}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, **drafts},
    }


LOWEST = -9999.0
"""The logprob that stands for minus infinity in OpenAI's API."""
