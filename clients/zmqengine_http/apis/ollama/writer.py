"""Encodes a choice as Ollama's lines of JSON, or as one document."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

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
from zmqengine_http.apis.chat_completions.writer import chat_logprobs
from zmqengine_http.generating.generation import Generation
from zmqengine_http.serving.errors import ApiError

LINES = ((b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no"))
"""Headers of a stream; without the second nginx buffers its lines."""
_NS_PER_MS = 1_000_000


def as_message(content: str, thinking: str, calls: Sequence[object]) -> dict[str, object]:
    """The fields of a piece of a chat."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def as_response(content: str, thinking: str, calls: Sequence[object]) -> dict[str, object]:
    """The fields of a piece of a generated text."""
    document: dict[str, object] = {"response": content}
    if thinking:
        document["thinking"] = thinking
    return document


class OllamaWriter:
    """An `AnswerWriter` for the one choice of an Ollama request; `fields` are `as_message` or `as_response`.

    A call is one line, once its arguments are complete.
    """

    def __init__(
        self,
        generation: Generation,
        model: str,
        fields: Callable[[str, str, Sequence[object]], Mapping[str, object]],
    ) -> None:
        self._fields = fields
        self._name = model
        self._model = generation.model
        self._top = generation.options.logprobs or 0
        self._began_ns = time.monotonic_ns()
        self._call: tuple[CallStarted, list[str]] | None = None
        self._finish = Finish("stop")

    def opening(self, index: int, start: Start) -> bytes:
        return b""

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        content, thinking = (text.text, "") if text.kind == "content" else ("", text.text)
        return self._line(content, thinking, logprobs=logprobs)

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        self._call = call, []
        return b""

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        assert self._call is not None
        self._call[1].append(piece.text)
        return b""

    def call_ended(self, index: int, place: int) -> bytes:
        assert self._call is not None
        call, parts = self._call
        self._call = None
        return self._line("", calls=[_call(place, call.id, call.name, "".join(parts))])

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        self._finish = finish
        return self._line("", logprobs=logprobs) if logprobs is not None else b""

    def done(self, usage: Usage) -> bytes:
        return _encoded({**self._document("", "", ()), **self._end(self._finish, usage)}) + b"\n"

    def error(self, error: ApiError) -> bytes:
        return ollama_error(error, "") + b"\n"

    def keepalive(self) -> bytes:
        return self._line("")

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        calls = [_call(index, call.id, call.name, call.arguments) for index, call in enumerate(choice.calls)]
        document = self._document(choice.content, choice.reasoning, calls) | self._logprobs(choice.logprobs)
        return _encoded({**document, **self._end(choice.finish, usage)})

    def _line(
        self,
        content: str,
        thinking: str = "",
        calls: Sequence[object] = (),
        logprobs: ChoiceLogprobs | None = None,
    ) -> bytes:
        return _encoded(self._document(content, thinking, calls) | self._logprobs(logprobs)) + b"\n"

    def _document(self, content: str, thinking: str, calls: Sequence[object]) -> dict[str, object]:
        return {
            "model": self._name, "created_at": now(), **self._fields(content, thinking, calls), "done": False,
        }  # fmt: skip

    def _logprobs(self, logprobs: ChoiceLogprobs | None) -> dict[str, object]:
        if logprobs is None:
            return {}
        return {"logprobs": chat_logprobs(self._model, self._top, logprobs)["content"]}

    def _end(self, finish: Finish, usage: Usage) -> dict[str, object]:
        return {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": int(usage.prefill_ms * _NS_PER_MS),
            "eval_count": usage.completion,
            "eval_duration": int(usage.decode_ms * _NS_PER_MS),
        }


def _call(place: int, id_: str, name: str, arguments: str) -> dict[str, object]:
    try:
        parsed: object = msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        # Cut short, or no object: this API has no other form of arguments than an object.
        parsed = {}
    return {"id": id_, "function": {"index": place, "name": name, "arguments": parsed}}


def now() -> str:
    """The present time as Ollama writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def ollama_error(error: ApiError, request_id: str) -> bytes:
    """Ollama's error body: `{"error": message}`."""
    return _encoded({"error": error.message})


_encoded = msgspec.json.encode
