"""Watches an answer go out, and remembers what led to its calls."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_http.answers.answer_events import (
    AnswerWriter,
    CallArguments,
    CallStarted,
    Finish,
    Logprobs,
    Start,
    Text,
    WholeChoice,
)
from zmqengine_http.answers.usage import Usage
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.stable_head.answer_memory import AnswerMemory


class RememberingWriter:
    """An `AnswerWriter` that writes what another one does. Calls are remembered once they are complete."""

    def __init__(self, writer: AnswerWriter, memory: AnswerMemory) -> None:
        self._writer = writer
        self._memory = memory
        self._reasoning: dict[int, list[str]] = {}
        self._calls: dict[tuple[int, int], tuple[str, list[str]]] = {}

    def opening(self, index: int, start: Start) -> bytes:
        return self._writer.opening(index, start)

    def text(self, index: int, text: Text, logprobs: Logprobs | None) -> bytes:
        if text.kind == "reasoning":
            self._reasoning.setdefault(index, []).append(text.text)
        return self._writer.text(index, text, logprobs)

    def call_started(self, index: int, call: CallStarted, logprobs: Logprobs | None) -> bytes:
        self._calls[index, call.place] = call.id, []
        return self._writer.call_started(index, call, logprobs)

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        self._calls[index, piece.place][1].append(piece.text)
        return self._writer.call_arguments(index, piece)

    def call_ended(self, index: int, place: int) -> bytes:
        id_, arguments = self._calls.pop((index, place))
        self._memory.remember(id_, "".join(self._reasoning.get(index, ())), "".join(arguments))
        return self._writer.call_ended(index, place)

    def closing(self, index: int, finish: Finish, logprobs: Logprobs | None) -> bytes:
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
