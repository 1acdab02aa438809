"""Reasoning and arguments of recent tool calls, for clients that send only a part of them back.

Many clients drop the reasoning of a turn, or reorder the arguments of its calls, before they send it back. A
template that renders the reasoning of the current chain of calls then produces other tokens than those in the
prefix cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from zmqengine_http.answers.answer_events import (
    AnswerWriter,
    CallArguments,
    CallStarted,
    ChoiceLogprobs,
    Finish,
    Start,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.serving.errors import ApiError

BYTES_MAX = 32 * 1024 * 1024
REASONING_CHARS_MAX = 256 * 1024


class _Generated(msgspec.Struct, frozen=True):
    reasoning: str
    arguments: dict[str, object] | None
    bytes: int


class AnswerMemory:
    """An LRU cache of reasoning and arguments by the id of the call, which is unguessable; thread-safe."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._calls: OrderedDict[str, _Generated] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def remember(self, call_id: str, reasoning: str, arguments: str) -> None:
        """Keep the reasoning generated before a call, and the call's arguments as JSON."""
        if len(reasoning) > REASONING_CHARS_MAX:
            return
        try:
            parsed = msgspec.json.decode(arguments, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            parsed = None
        generated = _Generated(reasoning, parsed, len(reasoning) + 2 * len(arguments) + 400)
        with self._lock:
            old = self._calls.pop(call_id, None)
            self._bytes += generated.bytes - (old.bytes if old else 0)
            self._calls[call_id] = generated
            while self._bytes > self._bytes_max:
                self._bytes -= self._calls.popitem(last=False)[1].bytes

    def restore(self, messages: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], int]:
        """The messages with lost reasoning and argument order restored, and the number of messages changed.

        Reasoning that a client did send is kept. The order of arguments is restored only if their values are
        equal.
        """
        restored, changed = [], 0
        for message in messages:
            calls = message.get("tool_calls")
            new = self._restored(message, calls) if isinstance(calls, list) and calls else message
            if new is not message:
                changed += 1
            restored.append(new)
        return restored, changed

    def _restored(self, message: dict[str, object], calls: list[object]) -> dict[str, object]:
        generated = [self._find(call) for call in calls]
        new = message
        reasoning = next((each.reasoning for each in generated if each and each.reasoning), "")
        if reasoning and not message.get("reasoning_content"):
            new = {**new, "reasoning_content": reasoning}
        ordered = [_in_generated_order(call, each) for call, each in zip(calls, generated, strict=True)]
        if any(after is not before for after, before in zip(ordered, calls, strict=True)):
            new = {**new, "tool_calls": ordered}
        return new

    def _find(self, call: object) -> _Generated | None:
        if not isinstance(call, dict):
            return None
        with self._lock:
            generated = self._calls.get(call.get("id", ""))
            if generated is not None:
                self._calls.move_to_end(call["id"])
        return generated


def _in_generated_order(call: object, generated: _Generated | None) -> object:
    """The call with its arguments in the order in which they were generated."""
    if generated is None or generated.arguments is None or not isinstance(call, dict):
        return call
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if (
        not isinstance(function, dict)
        or arguments != generated.arguments
        or _same_order(arguments, generated.arguments)
    ):
        return call
    return {**call, "function": {**function, "arguments": generated.arguments}}


def _same_order(one: object, other: object) -> bool:
    """Whether equal values have their keys in the same order."""
    return msgspec.json.encode(one) == msgspec.json.encode(other)


class RememberingWriter:
    """An `AnswerWriter` that delegates to another, and adds each complete call to an `AnswerMemory`."""

    def __init__(self, writer: AnswerWriter, memory: AnswerMemory) -> None:
        self._writer = writer
        self._memory = memory
        self._reasoning: dict[int, list[str]] = {}
        self._calls: dict[tuple[int, int], tuple[str, list[str]]] = {}

    def opening(self, index: int, start: Start) -> bytes:
        return self._writer.opening(index, start)

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        if text.kind == "reasoning":
            self._reasoning.setdefault(index, []).append(text.text)
        return self._writer.text(index, text, logprobs)

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        self._calls[index, call.place] = call.id, []
        return self._writer.call_started(index, call, logprobs)

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        self._calls[index, piece.place][1].append(piece.text)
        return self._writer.call_arguments(index, piece)

    def call_ended(self, index: int, place: int) -> bytes:
        id_, arguments = self._calls.pop((index, place))
        self._memory.remember(id_, "".join(self._reasoning.get(index, ())), "".join(arguments))
        return self._writer.call_ended(index, place)

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        return self._writer.closing(index, finish, logprobs)

    def done(self, usage: Usage) -> bytes:
        return self._writer.done(usage)

    def error(self, error: ApiError) -> bytes:
        return self._writer.error(error)

    def keepalive(self) -> bytes:
        return self._writer.keepalive()

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        for choice in choices:
            for call in choice.calls:
                self._memory.remember(call.id, choice.reasoning, call.arguments)
        return self._writer.whole(choices, usage)
