"""One choice while it is generated: tokens in, events and logprobs out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.aio.streams import AsyncTokenStream
from zmqengine_client.core.chunks import TokenChunk
from zmqengine_client.text.answer_text import AnswerText
from zmqengine_client.text.tool_calls import Delta
from zmqengine_http.answers.answer_events import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    Finish,
    Start,
    Text,
    Usage,
)
from zmqengine_http.serving.errors import ApiError

PORTION_TOKENS = 64
"""Tokens turned into events without a yield to the event loop: about 1 ms with many logprobs."""


class Piece(NamedTuple):
    """The events of one wake-up, in order, and the tokens they came from."""

    events: list[AnswerEvent]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None


class ChoiceStream:
    """One choice of a response. Iterate over `pieces` to the end; then `finish` and `add_usage` are valid.

    `ending` is True while the last pieces come without a further wait. `first_call_only` ends the choice after one
    tool call.
    `constrained`: the text has to be whole, so a stop string cuts it. Events and counts do not depend on how the
    tokens were cut into chunks. `prompt_scores` has the logprobs of the prompt, which come first and have no text; it
    is the `stream` too if there is no output.
    """

    def __init__(
        self,
        index: int,
        stream: AsyncTokenStream,
        text: AnswerText,
        *,
        prompt_tokens: int,
        with_logprobs: bool = False,
        first_call_only: bool = False,
        constrained: bool = False,
        prompt_scores: AsyncTokenStream | None = None,
    ) -> None:
        self.index = index
        self.with_logprobs = with_logprobs
        self.finish = Finish("stop")
        self.ending = False
        self._stream = stream
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._first_call_only = first_call_only
        self._constrained = constrained
        self._prompt_scores = prompt_scores
        self._calls = 0
        self._calls_ended = 0
        self._tokens = 0
        self._reasoning_tokens = 0

    @property
    def start(self) -> Start:
        """The prompt counts known so far."""
        progress = self._stream.progress
        return Start(self._prompt_tokens, progress.cached if progress else 0)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The choice as it is generated. Raises an error of `zmqengine_client.errors` if the request fails, and an
        `ApiError` if an operator ended it.
        """
        may_end_early = self._text.may_end_early
        take = self._take_one_by_one if may_end_early else self._take_all
        if self._prompt_scores is not None:
            async for chunk in self._prompt_scores:
                yield Piece([], chunk.tokens, chunk.logprobs)
        async for chunk in self._stream:
            if not may_end_early and len(chunk.tokens) <= PORTION_TOKENS:
                # The fast path of nearly every chunk.
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
                    # A backlog behind a slow client must not stall every other stream.
                    await asyncio.sleep(0)
            if self._complete:
                self._stream.close()
                break
        if not self._complete and self._stream.result.finish == "abort":
            raise _ended_by_operator()
        if not (self._first_call_only and self._calls_ended):
            yield Piece(self._events(self._text.finish()), [], None)
        self.finish = Finish(self._reason(), self._text.stop_string, self._stop_token())

    def _reason(self) -> Literal["stop", "length", "tool_calls"]:
        """The reason, in which `stop` and `tool_calls` mean that the content and the calls are whole."""
        if self._calls:
            # A call was streamed as far as it came; the reason says that it was cut.
            return "length" if self._text.cut_call else "tool_calls"
        if self._text.stopped:
            return "length" if self._constrained else "stop"
        return "length" if self._stream.result.finish == "length" else "stop"

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._stream.close()
        if self._prompt_scores is not None:
            self._prompt_scores.close()

    def add_usage(self, usage: Usage, *, prompt: bool) -> None:
        """Add this choice's tokens to `usage`, and with `prompt` those of its prompt."""
        usage.completion += self._tokens
        usage.reasoning += self._reasoning_tokens
        result = self._stream.result
        usage.take_times(result.queue_ms, result.prefill_ms, result.decode_ms)
        drafted = sum(proposed for proposed, _ in result.drafts.values())
        accepted = sum(accepted for _, accepted in result.drafts.values())
        # Drafts also became tokens after the stop string, which are not counted as output.
        beyond = max(0, accepted - self._tokens)
        usage.drafted += drafted - beyond
        usage.drafted_accepted += accepted - beyond
        if prompt:
            usage.prompt += self._prompt_tokens
            usage.cached += result.cached_tokens
            usage.kept += result.kept_tokens

    def _stop_token(self) -> int | None:
        """The request's own stop token that ended the choice, or None."""
        if self._text.stopped or self._calls or self._stream is self._prompt_scores:
            return None
        last = self._stream.result.tokens[-1:]
        return last[0] if last and last[0] in self._text.stop_token_ids else None

    @property
    def _complete(self) -> bool:
        return self._text.stopped or (self._first_call_only and self._calls_ended > 0)

    def _take_all(self, chunk: TokenChunk) -> Piece:
        self._tokens += len(chunk.tokens)
        events, visible = self._events(self._text.push(chunk.tokens)), self._text.visible(chunk.tokens)
        logprobs = chunk.logprobs and chunk.logprobs[: len(visible)]
        return Piece(events, visible, logprobs)

    def _take_one_by_one(self, chunk: TokenChunk) -> Piece:
        """The tokens of the chunk that belong to the choice, which may end at any of them."""
        events: list[AnswerEvent] = []
        used = 0
        for token in chunk.tokens:
            used += 1
            reasoned = self._text.in_reasoning
            events += self._events(self._text.push([token]))
            if reasoned or self._text.in_reasoning:
                self._reasoning_tokens += 1
            if self._complete:
                break
        self._tokens += used
        visible = self._text.visible(chunk.tokens[:used])
        return Piece(_merge_texts(events), visible, chunk.logprobs and chunk.logprobs[: len(visible)])

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


def _ended_by_operator() -> ApiError:
    """A 503 for an output that an operator cut: it is neither whole nor as long as was asked."""
    return ApiError(503, "an operator ended this request", kind="service_unavailable_error", code="aborted")


def total_usage(choices: Sequence[ChoiceStream], per_prompt: int) -> Usage:
    """The usage of finished choices in index order, `per_prompt` of them to each prompt."""
    usage = Usage()
    for choice in choices:
        choice.add_usage(usage, prompt=choice.index % per_prompt == 0)
    return usage


def _portions(chunk: TokenChunk) -> Sequence[TokenChunk]:
    """The chunk in portions of at most `PORTION_TOKENS`; nearly always the chunk itself."""
    if len(chunk.tokens) <= PORTION_TOKENS:
        return (chunk,)
    starts = range(0, len(chunk.tokens), PORTION_TOKENS)
    return [_part_of(chunk, start, start + PORTION_TOKENS) for start in starts]


def _part_of(chunk: TokenChunk, start: int, stop: int) -> TokenChunk:
    logprobs = None if chunk.logprobs is None else chunk.logprobs[start:stop]
    return TokenChunk(chunk.first_index + start, chunk.tokens[start:stop], logprobs)


def _merge_texts(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """The events with adjacent texts of one kind merged."""
    merged: list[AnswerEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Text) and isinstance(last, Text) and last.kind == event.kind:
            merged[-1] = Text(event.kind, last.text + event.text)
        else:
            merged.append(event)
    return merged
