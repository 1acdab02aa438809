"""Choices to an HTTP response: streamed as server-sent events, or as one body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.answers.answer_events import (
    AnswerEvent,
    AnswerWriter,
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceLogprobs,
    CompleteCall,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.answers.choice import ChoiceStream, Piece, total_usage
from zmqengine_http.serving.errors import ApiError, from_engine
from zmqengine_http.serving.exchange import JSON, Exchange

T = TypeVar("T")

COMMENT = b": keepalive\n\n"
"""An SSE comment, which every reader skips, as a keep-alive."""
WAITING_BYTES_MAX = 64 * 1024
"""Bytes that may queue behind a blocked write before the choices feel backpressure."""


async def respond_whole(
    exchange: Exchange, choices: Sequence[ChoiceStream], per_prompt: int, writer: AnswerWriter
) -> None:
    """Wait for every choice and send one body. Raises the first error of a choice."""
    whole = await _all([_collect(choice) for choice in choices])
    usage = total_usage(choices, per_prompt)
    _note(exchange, usage)
    await exchange.send(200, [JSON], writer.whole(whole, usage))


async def respond_events(
    exchange: Exchange,
    choices: Sequence[ChoiceStream],
    per_prompt: int,
    writer: AnswerWriter,
    *,
    keepalive_ms: int,
) -> None:
    """Stream each token as it comes.

    The response starts with the first token or the first keep-alive, so that an earlier failure is raised and
    keeps its own HTTP status. A later failure is encoded by the writer's `error` and ends the stream.
    """
    events = EventStream(exchange, keepalive_ms / 1000, writer.keepalive)
    try:
        alone = len(choices) == 1
        await _all([_pump(choice, events, writer, alone=alone) for choice in choices])
        usage = total_usage(choices, per_prompt)
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


async def _pump(choice: ChoiceStream, events: EventStream, writer: AnswerWriter, *, alone: bool) -> None:
    """Write the events of one choice.

    The last token and the closing go out in one write; with `alone` the end of the stream goes with them.
    """
    index = choice.index
    pending = _PendingLogprobs(choice.with_logprobs)
    opened = False
    async for piece in choice.pieces():
        pending.add(piece)
        if not piece.events:
            continue
        data = b"" if opened else writer.opening(index, choice.start)
        opened = True
        for event in piece.events:
            data += _encoded(writer, index, event, pending)
        await events.write(data, more=choice.ending)
    data = b"" if opened else writer.opening(index, choice.start)
    await events.write(data + writer.closing(index, choice.finish, pending.take()), more=alone)


def _encoded(writer: AnswerWriter, index: int, event: AnswerEvent, pending: _PendingLogprobs) -> bytes:
    if isinstance(event, Text):
        return writer.text(index, event, pending.take())
    if isinstance(event, CallStarted):
        return writer.call_started(index, event, pending.take())
    if isinstance(event, CallArguments):
        return writer.call_arguments(index, event)
    return writer.call_ended(index, event.place)


async def _collect(choice: ChoiceStream) -> WholeChoice:
    content: list[str] = []
    reasoning: list[str] = []
    started: list[CallStarted] = []
    arguments: list[list[str]] = []
    pending = _PendingLogprobs(choice.with_logprobs)
    async for piece in choice.pieces():
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
        CompleteCall(call.id, call.name, "".join(parts))
        for call, parts in zip(started, arguments, strict=True)
    ]
    return WholeChoice(
        choice.index, choice.finish, "".join(content), "".join(reasoning), calls, pending.take(whole=True)
    )


class _PendingLogprobs:
    """Logprobs of tokens whose text is still held back; the next text event takes them."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._tokens: list[int] = []
        self._entries: list[TokenLogprob] = []

    def add(self, piece: Piece) -> None:
        if self._wanted and piece.logprobs:
            self._tokens += piece.tokens
            self._entries += piece.logprobs

    def take(self, *, whole: bool = False) -> ChoiceLogprobs | None:
        if not self._wanted or not (self._tokens or whole):
            return None
        taken = ChoiceLogprobs(self._tokens, self._entries)
        self._tokens, self._entries = [], []
        return taken


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines; the first failure cancels the others and is raised."""
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


class EventStream:
    """Writes the server-sent events of several choices to one response, without one choice blocking another.

    The response starts with the first event. Events that come while a write blocks on the client are
    coalesced into the next write, up to `WAITING_BYTES_MAX`. After `keepalive_s` of silence `keepalive()` is
    written. An HTTP/1.0 client, which cannot read a chunked body, gets everything at the end.
    """

    def __init__(self, exchange: Exchange, keepalive_s: float, keepalive: Callable[[], bytes]) -> None:
        self._exchange = exchange
        self._in_one_piece = exchange.scope["http_version"] == "1.0"
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._writing = False
        self._written = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._keep_alive)
        self._beat: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether an event was sent to the client or is queued for it."""
        return self._exchange.started or (bool(self._waiting) and not self._in_one_piece)

    async def write(self, data: bytes, *, more: bool = False) -> None:
        """Send events; returns once they are sent, or queued behind a write in progress.

        With `more`, the events wait for the next `write`, which is imminent: one body chunk instead of two.
        """
        if self._in_one_piece or more or self._writing:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._writing:
                while self._waiting_bytes > WAITING_BYTES_MAX:
                    self._written.clear()
                    await self._written.wait()
            return
        if self._waiting:
            data = self._take_waiting(data)
        self._writing = True
        try:
            while data:
                if not self._exchange.started:
                    await self._exchange.start(200, self._exchange.stream_headers)
                self._written_at = self._loop.time()
                await self._exchange.write(data)
                if not self._waiting:
                    break
                data = self._take_waiting()
                self._written.set()
        finally:
            self._writing = False

    async def finish(self, data: bytes) -> None:
        """Send the last events. No write may be in progress but for a keep-alive."""
        self.close()
        if self._beat is not None:
            await self._beat
        data = self._take_waiting(data)
        if self._in_one_piece:
            await self._exchange.send(200, self._exchange.stream_headers, data)
            return
        if not self._exchange.started:
            await self._exchange.start(200, self._exchange.stream_headers)
        await self._exchange.write(data, last=True)

    def close(self) -> None:
        """Stop the keep-alive timer."""
        self._timer.cancel()

    def _take_waiting(self, data: bytes = b"") -> bytes:
        """The queued events followed by `data`; empties the queue."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return b"".join((*taken, data))

    def _keep_alive(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._keepalive_s:
            self._beat = self._loop.create_task(self.write(self._keepalive()))
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._keep_alive)
