"""A request as chunks of text, without waiting: the base of the text streams of both halves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.core.chunks import Completion, TextChunk, TokenChunk, ToolCall
from zmqengine_client.core.request import Request, TokenReader
from zmqengine_client.text.answer_text import AnswerText
from zmqengine_client.text.stop_strings import StopAutomaton
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import Delta, TextSplitter


class TextReader:
    """The text of a request up to its end token or its first stop string after `min_tokens`.

    The whole text does not depend on how tokens were cut into chunks.
    """

    def __init__(self, request: Request, stops: Sequence[str]) -> None:
        self.request = request
        self._reader = TokenReader(request)
        self._stops = StopAutomaton(stops)
        self._answer: AnswerText | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_WrittenCall] = []
        self._first_index = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished = False

    def start(self, tokenizer: Tokenizer, splitter: TextSplitter | None = None) -> None:
        """Set the tokenizer, and the splitter of the answer to a chat. `take` returns None before."""
        options = self.request.options
        eos = frozenset() if options.ignore_eos else tokenizer.eos_token_ids
        ends = eos | frozenset(options.stop_token_ids)
        min_tokens = options.sampling.min_tokens
        self._answer = AnswerText(
            tokenizer, self._stops, ends, splitter=splitter, unsearched_tokens=min_tokens
        )

    def take(self) -> TextChunk | None:
        """The text that became final since the last call, or None. See `TokenReader.take`."""
        if self._finished:
            return None
        # Read before the tokens: `end` is set after the last of them.
        ended = self.request.ended
        deltas: list[Delta] = []
        if self._answer is not None:
            chunk = self._reader.take()
            if chunk is not None:
                deltas = self._read(self._answer, chunk)
            if self._answer.stopped or ended:
                deltas += self._answer.finish()
                self._finished = True
        self._finished |= ended
        text = "".join([delta.text for delta in deltas if delta.kind == "content"])
        reasoning = "".join([delta.text for delta in deltas if delta.kind == "reasoning"])
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._take_calls(deltas)
        if not text and not reasoning and not (self._finished and self._tokens):
            return None
        logprobs = self._logprobs if self.request.logprobs is not None else None
        result = TextChunk(text, self._tokens, logprobs, self._first_index, reasoning)
        self._first_index += len(self._tokens)
        self._tokens, self._logprobs = [], []
        return result

    @property
    def finished(self) -> bool:
        """Whether all of the output has been taken."""
        return self._finished

    @property
    def wants_abort(self) -> bool:
        """Whether a stop string was found while the worker still generates."""
        return self._match is not None and not self.request.ended

    def completion(self) -> Completion:
        """The outcome. After a stop string it holds the tokens up to the one that completed it."""
        completion = msgspec.structs.replace(
            self.request.completion(),
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=[call for written in self._calls if (call := written.read()) is not None],
        )
        if self._match is not None:
            tokens = completion.tokens[: self._first_index]
            completion = msgspec.structs.replace(
                completion, finish="stop", message="", tokens=tokens, stop_string=self._match
            )
        if completion.finish == "stop" and self._calls and self._answer is not None and self._answer.cut_call:
            completion = msgspec.structs.replace(completion, finish="length")
        return completion

    def failure(self) -> ZmqEngineError | None:
        """The error the request ended with; None if the text was complete before."""
        return self.request.failure() if self._match is None else None

    @property
    def _match(self) -> str | None:
        return self._answer.stop_string if self._answer is not None else None

    def _read(self, answer: AnswerText, chunk: TokenChunk) -> list[Delta]:
        tokens, used = chunk.tokens, len(chunk.tokens)
        if not answer.may_end_early:
            deltas = answer.push(tokens)
        else:
            deltas = []
            for index, token in enumerate(tokens):
                deltas += answer.push([token])
                if answer.stopped:
                    used = index + 1
                    break
        self._tokens += tokens[:used]
        if chunk.logprobs is not None:
            self._logprobs += chunk.logprobs[:used]
        return deltas

    def _take_calls(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.kind in ("call", "call_start"):
                self._calls.append(_WrittenCall(delta.name))
            if delta.kind in ("call", "call_text"):
                self._calls[-1].arguments.append(delta.text)
            if delta.kind in ("call", "call_end"):
                self._calls[-1].whole = True


class _WrittenCall:
    """A call while it is written."""

    def __init__(self, name: str) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments: list[str] = []
        self.whole = False

    def read(self) -> ToolCall | None:
        """The call; None for one that was cut or is malformed, since no program can run it."""
        if not self.whole:
            return None
        try:
            arguments = msgspec.json.decode("".join(self.arguments), type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None
        return ToolCall(self.id, self.name, arguments)
