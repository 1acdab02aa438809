"""One choice of an answer while it is generated: tokens in, deltas and logprobs out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import NamedTuple

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.async_streams import AsyncTokenStream
from zmqengine_client.chunks import TokenChunk
from zmqengine_http.chunks import ToolCallMade
from zmqengine_http.text import AnswerText
from zmqengine_http.tool_calls import Delta, TextSplitter
from zmqengine_http.usage import Usage


class Piece(NamedTuple):
    """What one wake-up brought: deltas and calls in order, and the tokens they came from."""

    deltas: list[Delta]
    calls: list[ToolCallMade]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None


class Answer:
    """A choice. Iterate over `pieces` to its end; then `finish_reason` and `add_usage` say how it went.

    `splitter` finds reasoning and tool calls; None where there are none to find. `first_call_only` ends the answer
    after one call. What comes out, and what is counted, does not depend on how the tokens were cut into chunks.
    """

    def __init__(
        self,
        index: int,
        stream: AsyncTokenStream,
        text: AnswerText,
        *,
        splitter: TextSplitter | None = None,
        first_call_only: bool = False,
    ) -> None:
        self.index = index
        self.finish_reason = ""
        self._stream = stream
        self._text = text
        self._splitter = splitter
        self._first_call_only = first_call_only
        self._calls = 0
        self._tokens = 0
        self._reasoning_tokens = 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes. Raises an error of `zmqengine_client.errors` if it fails."""
        one_by_one = self._splitter is not None or self._text.has_stops
        async for chunk in self._stream:
            if one_by_one:
                yield self._take_one_by_one(chunk)
            else:
                yield self._take_all(chunk)
            if self._complete:
                self._stream.close()
                break
        if not (self._first_call_only and self._calls):
            deltas = self._split(self._text.finish(), last=True)
            yield Piece(deltas, self._calls_in(deltas), [], None)
        cut = not self._text.stopped and self._stream.result.finish == "length"
        self.finish_reason = "tool_calls" if self._calls else "length" if cut else "stop"

    def close(self) -> None:
        """Abort what still runs."""
        self._stream.close()

    def add_usage(self, usage: Usage, *, prompt: bool) -> None:
        """Add the tokens of this choice, and of its prompt if that is not counted yet."""
        usage.completion += self._tokens
        usage.reasoning += self._reasoning_tokens
        if prompt:
            result = self._stream.result
            usage.prompt += result.prompt_tokens
            usage.cached += result.cached_tokens

    @property
    def _complete(self) -> bool:
        return self._text.stopped or (self._first_call_only and self._calls > 0)

    def _take_all(self, chunk: TokenChunk) -> Piece:
        self._tokens += len(chunk.tokens)
        text, visible = self._text.push(chunk.tokens), self._text.visible(chunk.tokens)
        logprobs = chunk.logprobs and chunk.logprobs[: len(visible)]
        return Piece([Delta("content", text)] if text else [], [], visible, logprobs)

    def _take_one_by_one(self, chunk: TokenChunk) -> Piece:
        """As many tokens of the chunk as belong to the answer: it may end at any of them."""
        deltas: list[Delta] = []
        calls: list[ToolCallMade] = []
        used = 0
        for token in chunk.tokens:
            used += 1
            reasoned = self._splitter is not None and self._splitter.in_reasoning
            new = self._split(self._text.push([token]))
            calls += self._calls_in(new)
            deltas += new
            if reasoned or (self._splitter is not None and self._splitter.in_reasoning):
                self._reasoning_tokens += 1
            if self._complete:
                break
        self._tokens += used
        visible = self._text.visible(chunk.tokens[:used])
        return Piece(_joined(deltas), calls, visible, chunk.logprobs and chunk.logprobs[: len(visible)])

    def _split(self, text: str, *, last: bool = False) -> list[Delta]:
        if self._splitter is None:
            return [Delta("content", text)] if text else []
        deltas = self._splitter.feed(text)
        return deltas + self._splitter.finish() if last else deltas

    def _calls_in(self, deltas: list[Delta]) -> list[ToolCallMade]:
        """Take the calls out of `deltas`."""
        found = [delta for delta in deltas if delta.kind == "call"]
        if not found:
            return []
        deltas[:] = [delta for delta in deltas if delta.kind != "call"]
        if self._first_call_only:
            found = found[: max(0, 1 - self._calls)]
        made = [
            ToolCallMade(self._calls + place, f"call_{secrets.token_hex(12)}", delta.name, delta.text)
            for place, delta in enumerate(found)
        ]
        self._calls += len(made)
        return made


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    joined: list[Delta] = []
    for delta in deltas:
        if joined and joined[-1].kind == delta.kind:
            joined[-1] = Delta(delta.kind, joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined
