"""Answers to responses: streamed as events, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.answers.answer import Answer, Choices, Piece
from zmqengine_http.answers.answer_events import (
    AnswerEvent,
    AnswerWriter,
    CallArguments,
    CallEnded,
    CallStarted,
    Logprobs,
    Text,
    ToolCall,
    WholeChoice,
)
from zmqengine_http.answers.usage import Usage
from zmqengine_http.serving.errors import ApiError, from_engine
from zmqengine_http.serving.exchange import JSON, Exchange
from zmqengine_http.serving.sse import EventStream

T = TypeVar("T")


async def respond_whole(exchange: Exchange, choices: Choices, writer: AnswerWriter) -> None:
    """Wait for every choice and send one body. Raises what a choice failed with."""
    whole = await _all([_collect(answer) for answer in choices.answers])
    usage = choices.usage()
    _note(exchange, usage)
    await exchange.send(200, [JSON], writer.whole(whole, usage))


async def respond_events(
    exchange: Exchange, choices: Choices, writer: AnswerWriter, *, keepalive_ms: int
) -> None:
    """Send each token as it comes.

    Nothing is sent before the first token or the first keep-alive, so that a refusal still has its own status: what
    fails before that is raised. What fails later is the writer's error, which ends the stream.
    """
    events = EventStream(exchange, keepalive_ms / 1000, writer.keepalive)
    try:
        alone = len(choices.answers) == 1
        await _all([_pump(answer, events, writer, alone=alone) for answer in choices.answers])
        usage = choices.usage()
        _note(exchange, usage)
        await events.finish(writer.done(usage))
    except (ZmqEngineError, ApiError) as error:
        if not events.begun:
            raise
        refusal = error if isinstance(error, ApiError) else from_engine(error)
        exchange.facts["error"] = refusal.code
        await events.finish(writer.error(refusal))
    finally:
        events.close()


async def _pump(answer: Answer, events: EventStream, writer: AnswerWriter, *, alone: bool) -> None:
    """Write one choice. Its last token and its closing are one piece; and what ends the stream, where it is `alone`."""
    index = answer.index
    pending = _PendingLogprobs(answer.with_logprobs)
    opened = False
    async for piece in answer.pieces():
        pending.add(piece)
        if not piece.events:
            continue
        data = b"" if opened else writer.opening(index, answer.start)
        opened = True
        for event in piece.events:
            data += _written(writer, index, event, pending)
        await events.write(data, more=answer.ending)
    data = b"" if opened else writer.opening(index, answer.start)
    await events.write(data + writer.closing(index, answer.finish, pending.take()), more=alone)


def _written(writer: AnswerWriter, index: int, event: AnswerEvent, pending: _PendingLogprobs) -> bytes:
    if isinstance(event, Text):
        return writer.text(index, event, pending.take())
    if isinstance(event, CallStarted):
        return writer.call_started(index, event, pending.take())
    if isinstance(event, CallArguments):
        return writer.call_arguments(index, event)
    return writer.call_ended(index, event.place)


async def _collect(answer: Answer) -> WholeChoice:
    content: list[str] = []
    reasoning: list[str] = []
    started: list[CallStarted] = []
    arguments: list[list[str]] = []
    pending = _PendingLogprobs(answer.with_logprobs)
    async for piece in answer.pieces():
        pending.add(piece)
        for event in piece.events:
            if isinstance(event, Text):
                (content if event.kind == "content" else reasoning).append(event.text)
            elif isinstance(event, CallStarted):
                started.append(event)
                arguments.append([])
            elif isinstance(event, CallArguments):
                arguments[event.place].append(event.text)
            else:
                assert isinstance(event, CallEnded)
    calls = [
        ToolCall(call.id, call.name, "".join(parts)) for call, parts in zip(started, arguments, strict=True)
    ]
    return WholeChoice(
        answer.index, answer.finish, "".join(content), "".join(reasoning), calls, pending.take(whole=True)
    )


class _PendingLogprobs:
    """Logprobs of tokens whose text has not come out yet: they go with the next text that does."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._tokens: list[int] = []
        self._entries: list[TokenLogprob] = []

    def add(self, piece: Piece) -> None:
        if self._wanted and piece.logprobs:
            self._tokens += piece.tokens
            self._entries += piece.logprobs

    def take(self, *, whole: bool = False) -> Logprobs | None:
        if not self._wanted or not (self._tokens or whole):
            return None
        taken = Logprobs(self._tokens, self._entries)
        self._tokens, self._entries = [], []
        return taken


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, or the first failure, with the others cancelled."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note(exchange: Exchange, usage: Usage) -> None:
    exchange.facts |= {
        "prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "completion_tokens": usage.completion,
        "queue_ms": usage.queue_ms, "prefill_ms": usage.prefill_ms, "decode_ms": usage.decode_ms,
    }  # fmt: skip
