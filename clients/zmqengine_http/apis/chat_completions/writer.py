"""Encodes a chat's choices as OpenAI's chat.completion and chat.completion.chunk objects.

The event of a text token is concatenated from parts encoded once, as there is one per token; all others go
through dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine_http.answers.answer_events import (
    CallArguments,
    CallStarted,
    ChoiceLogprobs,
    CompleteCall,
    Finish,
    Start,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.answers.respond import COMMENT
from zmqengine_http.apis.openai_api.frame import LOWEST, Frame
from zmqengine_http.apis.openai_api.freeform import freeform_input
from zmqengine_http.generating.generation import Generation
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.workers.worker import Model

_FIELDS = {"content": "content", "reasoning": "reasoning_content"}


class ChatWriter:
    """An `AnswerWriter` for one chat; `model` is the name that the client sent.

    `custom` names the custom tools: the input of their calls is a string inside the model's JSON, known only when
    that is complete.
    """

    def __init__(
        self,
        generation: Generation,
        model: str,
        *,
        include_usage: bool = False,
        timings: bool = False,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        self._frame = Frame(
            generation.id,
            "chat.completion.chunk",
            "chat.completion",
            model,
            include_usage=include_usage,
            timings=timings,
        )
        self._model = generation.model
        self._top = generation.options.logprobs or 0
        self._starts: dict[tuple[int, str], bytes] = {}
        self._choices = len(generation.prompts) * generation.options.n
        self._closed: set[int] = set()
        self._custom = custom
        self._inputs: dict[tuple[int, int], list[str]] = {}
        self._end = b'},"logprobs":null,"finish_reason":null}]' + self._frame.after

    def opening(self, index: int, start: Start) -> bytes:
        return self._choice(index, {"role": "assistant", "content": ""})

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        if logprobs is not None:
            return self._choice(index, {_FIELDS[text.kind]: text.text}, logprobs)
        start = self._starts.get((index, text.kind))
        if start is None:
            head = f'"choices":[{{"index":{index},"delta":{{"{_FIELDS[text.kind]}":'
            start = self._starts[index, text.kind] = self._frame.before + head.encode()
        return start + msgspec.json.encode(text.text) + self._end

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        if call.name in self._custom:
            self._inputs[index, call.place] = []
            opened = {"type": "custom", "custom": {"name": call.name, "input": ""}}
        else:
            opened = {"type": "function", "function": {"name": call.name, "arguments": ""}}
        return self._choice(index, {"tool_calls": [{"index": call.place, "id": call.id, **opened}]}, logprobs)

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        inputs = self._inputs.get((index, piece.place))
        if inputs is not None:
            inputs.append(piece.text)
            return b""
        return self._choice(
            index, {"tool_calls": [{"index": piece.place, "function": {"arguments": piece.text}}]}
        )

    def call_ended(self, index: int, place: int) -> bytes:
        inputs = self._inputs.pop((index, place), None)
        if inputs is None:
            return b""
        text = freeform_input("".join(inputs))
        return self._choice(index, {"tool_calls": [{"index": place, "custom": {"input": text}}]})

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        self._closed.add(index)
        return self._choice(index, {}, logprobs, finish)

    def done(self, usage: Usage) -> bytes:
        return self._frame.done(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def keepalive(self) -> bytes:
        """An empty delta of an open choice: idle timeouts of clients do not count comments."""
        index = next((index for index in range(self._choices) if index not in self._closed), None)
        return COMMENT if index is None else self._choice(index, {"content": ""})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        documents = [
            {
                "index": choice.index, "message": _message(choice, self._custom),
                "logprobs": self._logprobs(choice.logprobs), "finish_reason": choice.finish.reason,
                "stop_reason": choice.finish.stop_reason,
            }
            for choice in choices
        ]  # fmt: skip
        return self._frame.whole(documents, usage)

    def _choice(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: ChoiceLogprobs | None = None,
        finish: Finish | None = None,
    ) -> bytes:
        choice = {
            "index": index, "delta": delta,
            "logprobs": self._logprobs(logprobs), "finish_reason": finish and finish.reason,
        }  # fmt: skip
        if finish is not None:
            choice["stop_reason"] = finish.stop_reason
        return self._frame.event([choice])

    def _logprobs(self, logprobs: ChoiceLogprobs | None) -> object:
        return None if logprobs is None else chat_logprobs(self._model, self._top, logprobs)


def _message(choice: WholeChoice, custom: frozenset[str]) -> dict[str, object]:
    message: dict[str, object] = {
        "role": "assistant", "content": choice.content, "refusal": None, "annotations": [],
    }  # fmt: skip
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call, custom) for call in choice.calls]
    return message


def _call(call: CompleteCall, custom: frozenset[str]) -> dict[str, object]:
    if call.name in custom:
        called = {"name": call.name, "input": freeform_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": called}
    called = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": called}


def chat_logprobs(model: Model, top: int, logprobs: ChoiceLogprobs) -> dict[str, object]:
    """The logprobs of a chat choice: `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`.

    The concatenated `bytes` of adjacent tokens are valid text, even if one token holds only part of a
    character.
    """
    entries = [
        {
            **_entry(model, token, entry.logprob),
            "top_logprobs": [_entry(model, id_, logprob) for id_, logprob in entry.top[:top]],
        }
        for token, entry in zip(logprobs.tokens, logprobs.entries, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _entry(model: Model, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": model.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(model.tokenizer.token_bytes(token)),
    }
