"""The choices of an answer while they are generated: tokens in, events and logprobs out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.aio.streams import AsyncTokenStream
from zmqengine_client.core.chunks import TokenChunk
from zmqengine_http.answers.answer_events import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    Finish,
    Start,
    Text,
)
from zmqengine_http.answers.answer_text import AnswerText
from zmqengine_http.answers.usage import Usage
from zmqengine_http.tool_calls import Delta, TextSplitter

PORTION_TOKENS = 64
"""What is turned into events at once, some 1 ms with many logprobs."""


class Piece(NamedTuple):
    """What one wake-up brought: events in order, and the tokens they came from."""

    events: list[AnswerEvent]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None


class Answer:
    """A choice. Iterate over `pieces` to its end; then `finish` and `add_usage` say how it went. While it is `ending`
    the rest comes without waiting.

    `splitter` finds reasoning and tool calls; None where there are none to find. `first_call_only` ends the answer
    after one call. What comes out, and what is counted, does not depend on how the tokens were cut into chunks.
    """

    def __init__(
        self,
        index: int,
        stream: AsyncTokenStream,
        text: AnswerText,
        *,
        prompt_tokens: int,
        with_logprobs: bool = False,
        splitter: TextSplitter | None = None,
        first_call_only: bool = False,
    ) -> None:
        self.index = index
        self.with_logprobs = with_logprobs
        self.finish = Finish("stop")
        self.ending = False
        self._stream = stream
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._splitter = splitter
        self._first_call_only = first_call_only
        self._calls = 0
        self._calls_ended = 0
        self._tokens = 0
        self._reasoning_tokens = 0

    @property
    def start(self) -> Start:
        """What is known of the prompt by now."""
        progress = self._stream.progress
        return Start(self._prompt_tokens, progress.cached if progress else 0)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes. Raises an error of `zmqengine_client.errors` if it fails."""
        may_end_early = self._splitter is not None or self._text.has_stops
        take = self._take_one_by_one if may_end_early else self._take_all
        async for chunk in self._stream:
            if not may_end_early and len(chunk.tokens) <= PORTION_TOKENS:
                # The usual chunk, on its short way.
                self.ending = self._stream.ended
                yield take(chunk)
                continue
            for portion in _portions(chunk):
                piece = take(portion)
                self.ending = portion is chunk and (self._complete or self._stream.ended)
                yield piece
                if self._complete:
                    break
                if portion is not chunk:
                    # What had piled up behind a slow client must not stop all others.
                    await asyncio.sleep(0)
            if self._complete:
                self._stream.close()
                break
        if not (self._first_call_only and self._calls_ended):
            yield Piece(self._events(self._split(self._text.finish(), last=True)), [], None)
        cut = not self._text.stopped and self._stream.result.finish == "length"
        self.finish = Finish(self._reason(cut), self._text.stop_string, self._stop_token())

    def _reason(self, cut: bool) -> Literal["stop", "length", "tool_calls"]:
        if cut and self._calls_ended == self._calls and self._calls:
            return "tool_calls"
        if cut:
            # A call that was cut short is told as far as it came, and that it was.
            return "length"
        return "tool_calls" if self._calls else "stop"

    def close(self) -> None:
        """Abort what still runs."""
        self._stream.close()

    def add_usage(self, usage: Usage, *, prompt: bool) -> None:
        """Add the tokens of this choice, and of its prompt if that is not counted yet."""
        usage.completion += self._tokens
        usage.reasoning += self._reasoning_tokens
        result = self._stream.result
        usage.take_times(result.queue_ms, result.prefill_ms, result.decode_ms)
        for proposed, accepted in result.drafts.values():
            usage.drafted += proposed
            usage.drafted_accepted += accepted
        if prompt:
            usage.prompt += result.prompt_tokens
            usage.cached += result.cached_tokens

    def _stop_token(self) -> int | None:
        """The one of the request's own end tokens that ended it."""
        if self._text.stopped or self._calls:
            return None
        last = self._stream.result.tokens[-1:]
        return last[0] if last and last[0] in self._text.stop_token_ids else None

    @property
    def _complete(self) -> bool:
        return self._text.stopped or (self._first_call_only and self._calls_ended > 0)

    def _take_all(self, chunk: TokenChunk) -> Piece:
        self._tokens += len(chunk.tokens)
        text, visible = self._text.push(chunk.tokens), self._text.visible(chunk.tokens)
        logprobs = chunk.logprobs and chunk.logprobs[: len(visible)]
        return Piece([Text("content", text)] if text else [], visible, logprobs)

    def _take_one_by_one(self, chunk: TokenChunk) -> Piece:
        """As many tokens of the chunk as belong to the answer: it may end at any of them."""
        events: list[AnswerEvent] = []
        used = 0
        for token in chunk.tokens:
            used += 1
            reasoned = self._splitter is not None and self._splitter.in_reasoning
            events += self._events(self._split(self._text.push([token])))
            if reasoned or (self._splitter is not None and self._splitter.in_reasoning):
                self._reasoning_tokens += 1
            if self._complete:
                break
        self._tokens += used
        visible = self._text.visible(chunk.tokens[:used])
        return Piece(_joined(events), visible, chunk.logprobs and chunk.logprobs[: len(visible)])

    def _split(self, text: str, *, last: bool = False) -> list[Delta]:
        if self._splitter is None:
            return [Delta("content", text)] if text else []
        deltas = self._splitter.feed(text)
        return deltas + self._splitter.finish() if last else deltas

    def _events(self, deltas: list[Delta]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for delta in deltas:
            if delta.kind == "content" or delta.kind == "reasoning":
                events.append(Text(delta.kind, delta.text))
            elif not (self._first_call_only and self._calls_ended):
                events += self._call_events(delta)
        return events

    def _call_events(self, delta: Delta) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if delta.kind in ("call", "call_start"):
            events.append(CallStarted(self._calls, f"call_{secrets.token_hex(12)}", delta.name))
            self._calls += 1
        place = self._calls - 1
        if delta.text:
            events.append(CallArguments(place, delta.text))
        if delta.kind in ("call", "call_end"):
            events.append(CallEnded(place))
            self._calls_ended += 1
        return events


class Choices(NamedTuple):
    """The answers of one request, `each` of them to one prompt, in the order of their index."""

    answers: list[Answer]
    each: int

    def usage(self) -> Usage:
        """The tokens of all answers, once they have ended."""
        usage = Usage()
        for answer in self.answers:
            answer.add_usage(usage, prompt=answer.index % self.each == 0)
        return usage


def _portions(chunk: TokenChunk) -> Sequence[TokenChunk]:
    """The chunk in parts, none longer than a bound; itself, as it nearly always is."""
    if len(chunk.tokens) <= PORTION_TOKENS:
        return (chunk,)
    parts = (slice(start, start + PORTION_TOKENS) for start in range(0, len(chunk.tokens), PORTION_TOKENS))
    return [
        TokenChunk(
            chunk.first_index + part.start,
            chunk.tokens[part],
            None if chunk.logprobs is None else chunk.logprobs[part],
        )
        for part in parts
    ]


def _joined(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbouring texts of one kind as one."""
    joined: list[AnswerEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text) and last.kind == event.kind:
            joined[-1] = Text(event.kind, last.text + event.text)
        else:
            joined.append(event)
    return joined
