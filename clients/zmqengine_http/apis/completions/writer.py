"""Encodes a completion's choices as OpenAI's text_completion objects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from zmqengine.protocol.messages import TokenLogprob
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
from zmqengine_http.answers.respond import COMMENT
from zmqengine_http.apis.openai_api.frame import LOWEST, Frame
from zmqengine_http.generating.generation import Generation
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.workers.worker import Model


class TextWriter:
    """An `AnswerWriter` for one completion request; `model` is the name that the client sent.

    `echo`: the texts of the prompts, if each choice is to begin with its own.
    """

    def __init__(
        self,
        generation: Generation,
        model: str,
        *,
        include_usage: bool = False,
        timings: bool = False,
        echo: Sequence[str] = (),
    ) -> None:
        self._echo = echo
        self._firsts = (
            [prompt.tokens[0] for prompt in generation.prompts] if generation.scores_prompts else []
        )
        self._per_prompt = generation.options.n
        self._frame = Frame(
            generation.id,
            "text_completion",
            "text_completion",
            model,
            include_usage=include_usage,
            timings=timings,
        )
        self._model = generation.model
        self._top = generation.options.logprobs or 0
        self._shapes: dict[int, TextLogprobs] = {}
        self._starts: dict[int, bytes] = {}
        self._end = b',"logprobs":null,"finish_reason":null}]' + self._frame.after

    def opening(self, index: int, start: Start) -> bytes:
        text = self._echoed(index)
        return self.text(index, Text("content", text), None) if text else b""

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        if logprobs is not None:
            return self._choice(index, text.text, logprobs, None)
        start = self._starts.get(index)
        if start is None:
            head = f'"choices":[{{"index":{index},"text":'
            start = self._starts[index] = self._frame.before + head.encode()
        return start + msgspec.json.encode(text.text) + self._end

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        raise AssertionError("completions have no tools")

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        raise AssertionError("completions have no tools")

    def call_ended(self, index: int, place: int) -> bytes:
        raise AssertionError("completions have no tools")

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        return self._choice(index, "", logprobs, finish)

    def done(self, usage: Usage) -> bytes:
        return self._frame.done(usage)

    def error(self, error: ApiError) -> bytes:
        return self._frame.error(error)

    def keepalive(self) -> bytes:
        return COMMENT

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        documents = [
            self._document(
                choice.index, self._echoed(choice.index) + choice.content, choice.logprobs, choice.finish
            )
            for choice in choices
        ]
        return self._frame.whole(documents, usage)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._per_prompt] if self._echo else ""

    def _choice(self, index: int, text: str, logprobs: ChoiceLogprobs | None, finish: Finish | None) -> bytes:
        return self._frame.event([self._document(index, text, logprobs, finish)])

    def _document(
        self, index: int, text: str, logprobs: ChoiceLogprobs | None, finish: Finish | None
    ) -> dict[str, object]:
        document: dict[str, object] = {
            "index": index, "text": text, "logprobs": self._shaped(index, logprobs),
            "finish_reason": finish and finish.reason,
        }  # fmt: skip
        if finish is not None:
            document["stop_reason"] = finish.stop_reason
        return document

    def _shaped(self, index: int, logprobs: ChoiceLogprobs | None) -> object:
        if logprobs is None:
            return None
        shape = self._shapes.get(index)
        if shape is None:
            first = self._firsts[index // self._per_prompt] if self._firsts else None
            shape = self._shapes[index] = TextLogprobs(self._model, self._top, first)
        return shape.shaped(logprobs)


class TextLogprobs:
    """Encodes the logprobs of one choice incrementally.

    Fields are `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. Offsets count characters of the
    choice's text. As in OpenAI's API, a token that is part of a character is written as `bytes:\\xf0\\x9f`, and the
    `first` one of an echoed prompt, if it is given, has no logprob.
    """

    def __init__(self, model: Model, top: int, first: int | None = None) -> None:
        self._model = model
        self._top = top
        self._first = first
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def shaped(self, logprobs: ChoiceLogprobs) -> object:
        """The `logprobs` field of the next tokens of the choice."""
        first, self._first = self._first, None
        tokens = [*logprobs.tokens] if first is None else [first, *logprobs.tokens]
        entries: list[TokenLogprob | None] = (
            [*logprobs.entries] if first is None else [None, *logprobs.entries]
        )
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._model.tokenizer.token_bytes(token)))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [entry and max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [entry and self._best(entry) for entry in entries] if self._top else None,
            "text_offset": offsets,
        }

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        best = reversed(entry.top[: self._top])
        return {self._text(id_): max(logprob, LOWEST) for id_, logprob in best}

    def _text(self, token: int) -> str:
        text = self._model.token_text(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._model.tokenizer.token_bytes(token))
