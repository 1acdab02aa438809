"""Encodes a choice as events of Anthropic's Messages API, or as one message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine_http.answers.answer_events import (
    CallArguments,
    CallStarted,
    ChoiceLogprobs,
    Finish,
    Start,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.apis.anthropic.errors import error_document
from zmqengine_http.serving.errors import ApiError

SIGNATURE = "zmqengine"
"""A constant: clients drop thinking without a signature instead of sending it back, and nothing is signed
here."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_FIELDS = {"content": ("text", "text_delta"), "reasoning": ("thinking", "thinking_delta")}

_encode = msgspec.json.encode


class MessagesWriter:
    """An `AnswerWriter` for the one choice of a Messages request.

    Blocks are numbered in order; each is closed before the next one opens.
    """

    def __init__(self, id_: str, model: str, prompt_tokens: int) -> None:
        self._id = id_
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._started = False
        self._block = -1
        self._kind = ""
        self._delta_start = b""
        self._finish = Finish("stop")

    def opening(self, index: int, start: Start) -> bytes:
        return self._start(start.prompt_tokens, start.cached_tokens)

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        field, delta = _FIELDS[text.kind]
        opened = b""
        if self._kind != field:
            block: dict[str, object] = {"type": field, field: ""}
            if field == "thinking":
                block["signature"] = ""
            opened = self._open(field, block, f'{{"type":"{delta}","{field}":')
        return opened + self._delta_start + _encode(text.text) + b"}}\n\n"

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        block: dict[str, object] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        return self._open("tool_use", block, '{"type":"input_json_delta","partial_json":')

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        return self._delta_start + _encode(piece.text) + b"}}\n\n"

    def call_ended(self, index: int, place: int) -> bytes:
        return self._close()

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        self._finish = finish
        return self._close()

    def done(self, usage: Usage) -> bytes:
        delta = {"stop_reason": _stop_reason(self._finish), "stop_sequence": self._finish.stop_string}
        return _event("message_delta", {"delta": delta, "usage": _usage(usage)}) + _event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + _encode(error_document(error)) + b"\n\n"

    def keepalive(self) -> bytes:
        return self._start(self._prompt_tokens, 0) + _PING

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        blocks: list[dict[str, object]] = []
        if choice.reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE})
        if choice.content:
            blocks.append({"type": "text", "text": choice.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in choice.calls
        ]
        finish = choice.finish
        return _encode(
            self._message(blocks, _usage(usage))
            | {"stop_reason": _stop_reason(finish), "stop_sequence": finish.stop_string}
        )

    def _start(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        if self._started:
            return b""
        self._started = True
        usage = _usage(Usage(prompt=prompt_tokens, cached=cached_tokens))
        return _event("message_start", {"message": self._message([], usage)})

    def _message(self, content: list[dict[str, object]], usage: dict[str, object]) -> dict[str, object]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _open(self, kind: str, block: dict[str, object], delta: str) -> bytes:
        closed = self._close()
        self._block += 1
        self._kind = kind
        self._delta_start = (
            f"event: content_block_delta\ndata: "
            f'{{"type":"content_block_delta","index":{self._block},"delta":{delta}'
        ).encode()
        return closed + _event("content_block_start", {"index": self._block, "content_block": block})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signature = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signature = _event("content_block_delta", {"index": self._block, "delta": delta})
        self._kind = ""
        return signature + _event("content_block_stop", {"index": self._block})


def _event(name: str, fields: dict[str, object]) -> bytes:
    return f"event: {name}\ndata: ".encode() + _encode({"type": name, **fields}) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    """Anthropic's token counts, in which `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        **usage.kept_document,
    }


def _stop_reason(finish: Finish) -> str:
    if finish.stop_string is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish.reason]


def _input(arguments: str) -> object:
    """The arguments as an object; empty if the call was cut short and they do not parse."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except msgspec.MsgspecError:
        return {}
