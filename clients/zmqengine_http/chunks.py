"""The server-sent events of streamed responses, in OpenAI's shapes.

The one event made for every token is put together from parts encoded once; everything else goes through dicts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from zmqengine_http.tool_calls import Delta
from zmqengine_http.usage import Usage

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "zmqengine"

_encode = msgspec.json.encode


class ToolCallMade(NamedTuple):
    """A call of an answer, with its place among the answer's calls."""

    place: int
    id: str
    name: str
    arguments: str


class EventMaker(Protocol):
    """Makes the events of one streamed answer. `logprobs` are in the shape of the endpoint, or None."""

    def opening(self, index: int) -> bytes:
        """The event before the first token of a choice, if the endpoint has one."""

    def delta(self, index: int, delta: Delta, logprobs: object) -> bytes:
        """Text of the content or the reasoning."""

    def call(self, index: int, call: ToolCallMade, logprobs: object) -> bytes:
        """A whole tool call."""

    def closing(self, index: int, finish_reason: str, logprobs: object) -> bytes:
        """The last event of a choice."""

    def usage(self, usage: Usage) -> bytes:
        """The event after all choices."""


class ChatEvents:
    """Events of object chat.completion.chunk."""

    def __init__(self, id_: str, model: str, *, include_usage: bool) -> None:
        self._frame = _Frame(id_, "chat.completion.chunk", model, include_usage=include_usage)
        self._starts: dict[tuple[int, str], bytes] = {}
        self._end = b'},"logprobs":null,"finish_reason":null}]' + self._frame.after

    def opening(self, index: int) -> bytes:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, delta: Delta, logprobs: object) -> bytes:
        field = "content" if delta.kind == "content" else "reasoning_content"
        if logprobs is not None:
            return self._choice(index, {field: delta.text}, None, logprobs)
        start = self._starts.get((index, field))
        if start is None:
            start = self._frame.before + f'"choices":[{{"index":{index},"delta":{{"{field}":'.encode()
            self._starts[index, field] = start
        return start + _encode(delta.text) + self._end

    def call(self, index: int, call: ToolCallMade, logprobs: object) -> bytes:
        head = {
            "index": call.place, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""},
        }  # fmt: skip
        rest = {"index": call.place, "function": {"arguments": call.arguments}}
        return self._choice(index, {"tool_calls": [head]}, None, logprobs) + self._choice(
            index, {"tool_calls": [rest]}, None, None
        )

    def closing(self, index: int, finish_reason: str, logprobs: object) -> bytes:
        return self._choice(index, {}, finish_reason, logprobs)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.last(usage)

    def _choice(
        self, index: int, delta: dict[str, object], finish_reason: str | None, logprobs: object
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame.event([choice])


class TextEvents:
    """Events of object text_completion."""

    def __init__(self, id_: str, model: str, *, include_usage: bool) -> None:
        self._frame = _Frame(id_, "text_completion", model, include_usage=include_usage)
        self._starts: dict[int, bytes] = {}
        self._end = b',"logprobs":null,"finish_reason":null}]' + self._frame.after

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta, logprobs: object) -> bytes:
        if logprobs is not None:
            return self._choice(index, delta.text, None, logprobs)
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = (
                self._frame.before + f'"choices":[{{"index":{index},"text":'.encode()
            )
        return start + _encode(delta.text) + self._end

    def call(self, index: int, call: ToolCallMade, logprobs: object) -> bytes:
        raise AssertionError("completions have no tools")

    def closing(self, index: int, finish_reason: str, logprobs: object) -> bytes:
        return self._choice(index, "", finish_reason, logprobs)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.last(usage)

    def _choice(self, index: int, text: str, finish_reason: str | None, logprobs: object) -> bytes:
        return self._frame.event(
            [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}]
        )


class _Frame:
    """What is around the choices of every event of one answer."""

    def __init__(self, id_: str, kind: str, model: str, *, include_usage: bool) -> None:
        head = _encode(
            {
                "id": id_,
                "object": kind,
                "created": int(time.time()),
                "model": model,
                "system_fingerprint": FINGERPRINT,
            }
        )
        self.before = b"data: " + head[:-1] + b","
        self.after = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def event(self, choices: Sequence[object]) -> bytes:
        return self.before + b'"choices":' + _encode(choices) + self.after

    def last(self, usage: Usage) -> bytes:
        return self.before + b'"choices":[],"usage":' + _encode(usage.document()) + b"}\n\n"
