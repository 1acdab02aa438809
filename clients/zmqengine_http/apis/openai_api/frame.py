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
    event has a `usage`, null except in the last. With `timings` the worker's times stand beside the usage.
    """

    def __init__(
        self, id_: str, kind: str, whole_kind: str, model: str, *, include_usage: bool, timings: bool
    ) -> None:
        self._head = {"id": id_, "object": kind, "created": int(time.time()), "model": model}
        self._whole_kind = whole_kind
        self._include_usage = include_usage
        self._timings = timings
        head = msgspec.json.encode({**self._head, "system_fingerprint": FINGERPRINT})
        self.before = b"data: " + head[:-1] + b","
        self.after = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def event(self, choices: Sequence[object]) -> bytes:
        return self.before + b'"choices":' + msgspec.json.encode(choices) + self.after

    def done(self, usage: Usage) -> bytes:
        """The end of the stream, after the usage if `include_usage`."""
        if not self._include_usage:
            return DONE
        end = {"choices": [], **self._account(usage)}
        return self.before + msgspec.json.encode(end)[1:] + b"\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        """The error event, which ends a stream without `[DONE]`."""
        return b"data: " + openai_error(error, "") + b"\n\n"

    def whole(self, choices: Sequence[object], usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        return msgspec.json.encode(
            {
                **self._head, "object": self._whole_kind, "choices": choices, **self._account(usage),
                "system_fingerprint": FINGERPRINT,
            }
        )  # fmt: skip

    def _account(self, usage: Usage) -> dict[str, object]:
        """The usage of the request, and its times if they are asked for."""
        timings = {"timings": timings_document(usage)} if self._timings else {}
        return {"usage": usage_document(usage), **timings}


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
        "prompt_tokens_details": {"cached_tokens": usage.cached, **usage.kept_document},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, **drafts},
    }


def timings_document(usage: Usage) -> dict[str, object]:
    """The worker's times, with llama.cpp's names. The first token counts to the prompt's time."""
    return {
        "cache_n": usage.cached,
        "prompt_n": usage.prompt - usage.cached,
        "prompt_ms": usage.prefill_ms,
        "predicted_n": usage.completion,
        "predicted_ms": usage.decode_ms,
    }


LOWEST = -9999.0
"""The logprob that stands for minus infinity in OpenAI's API."""
