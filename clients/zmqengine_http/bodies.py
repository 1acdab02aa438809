"""The bodies of responses that are not streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from zmqengine_http.chunks import FINGERPRINT, ToolCallMade
from zmqengine_http.usage import Usage


@dataclass(frozen=True)
class WholeChoice:
    """One finished choice of a response that is not streamed."""

    index: int
    finish_reason: str
    content: str
    reasoning: str
    calls: list[ToolCallMade]
    logprobs: object


def chat_body(id_: str, model: str, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
    """A body of object chat.completion."""
    return _body(id_, "chat.completion", model, [_chat_choice(choice) for choice in choices], usage)


def text_body(id_: str, model: str, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
    """A body of object text_completion."""
    documents = [
        {
            "index": choice.index, "text": choice.content,
            "logprobs": choice.logprobs, "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]  # fmt: skip
    return _body(id_, "text_completion", model, documents, usage)


def _chat_choice(choice: WholeChoice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return {
        "index": choice.index, "message": message,
        "logprobs": choice.logprobs, "finish_reason": choice.finish_reason,
    }  # fmt: skip


def _body(id_: str, kind: str, model: str, choices: Sequence[object], usage: Usage) -> bytes:
    return msgspec.json.encode(
        {
            "id": id_, "object": kind, "created": int(time.time()), "model": model, "choices": choices,
            "usage": usage.document(), "system_fingerprint": FINGERPRINT,
        }
    )  # fmt: skip
