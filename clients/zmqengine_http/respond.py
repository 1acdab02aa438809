"""Answers to responses: streamed as events, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.answer import Answer, Piece
from zmqengine_http.bodies import WholeChoice
from zmqengine_http.chunks import DONE, EventMaker, ToolCallMade
from zmqengine_http.errors import ApiError, from_engine
from zmqengine_http.exchange import JSON, Exchange
from zmqengine_http.logprobs import LogprobShape
from zmqengine_http.usage import Usage

EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # For nginx: pass each event on at once.
    (b"x-accel-buffering", b"no"),
)
T = TypeVar("T")
KEEPALIVE = b": keepalive\n\n"
Shapes = Callable[[], LogprobShape] | None
BodyMaker = Callable[[Sequence[WholeChoice], Usage], bytes]


class Choices(NamedTuple):
    """The answers of one request, `each` of them to one prompt, in the order of their index."""

    answers: list[Answer]
    each: int
    shapes: Shapes

    def usage(self) -> Usage:
        """The tokens of all answers, once they have ended."""
        usage = Usage()
        for answer in self.answers:
            answer.add_usage(usage, prompt=answer.index % self.each == 0)
        return usage


async def respond_whole(exchange: Exchange, choices: Choices, make_body: BodyMaker) -> None:
    """Wait for every answer and send one body. Raises what an answer failed with."""
    whole = await _all([_collect(answer, choices.shapes) for answer in choices.answers])
    usage = choices.usage()
    _note(exchange, usage)
    await exchange.send(200, [JSON], make_body(whole, usage))


async def respond_events(
    exchange: Exchange, choices: Choices, maker: EventMaker, *, include_usage: bool, keepalive_ms: int
) -> None:
    """Send each token as it comes.

    Nothing is sent before the first token, so that a refusal still has its own status: what fails before that is
    raised. What fails later is an error event, after which the stream ends without `[DONE]`.
    """
    events = _Events(exchange, keepalive_ms / 1000)
    try:
        await _all([_pump(answer, events, maker, choices.shapes) for answer in choices.answers])
        usage = choices.usage()
        _note(exchange, usage)
        await events.finish((maker.usage(usage) if include_usage else b"") + DONE)
    except (ZmqEngineError, ApiError) as error:
        if not exchange.started:
            raise
        refusal = error if isinstance(error, ApiError) else from_engine(error)
        exchange.facts["error"] = refusal.code
        await events.finish(b"data: " + refusal.body() + b"\n\n")
    finally:
        events.close()


class _Events:
    """Writes events of several answers to one response, without one waiting for another's turn.

    What comes while a write waits for the client goes out with the next one.
    """

    def __init__(self, exchange: Exchange, keepalive_s: float) -> None:
        self._exchange = exchange
        self._waiting: list[bytes] = []
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._keepalive_s = keepalive_s
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._keep_alive)
        self._beat: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        if self._writing:
            self._waiting.append(data)
            return
        self._writing = True
        try:
            while data:
                if not self._exchange.started:
                    await self._exchange.start(200, EVENT_STREAM)
                self._written_at = self._loop.time()
                await self._exchange.write(data)
                data, self._waiting = b"".join(self._waiting), []
        finally:
            self._writing = False

    async def finish(self, data: bytes) -> None:
        """The last events. Nothing else is being written any more, but for a keepalive."""
        self.close()
        if self._beat is not None:
            await self._beat
        if not self._exchange.started:
            await self._exchange.start(200, EVENT_STREAM)
        await self._exchange.write(data, last=True)

    def close(self) -> None:
        self._timer.cancel()

    def _keep_alive(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._keepalive_s:
            self._beat = self._loop.create_task(self.write(KEEPALIVE))
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._keep_alive)


async def _pump(answer: Answer, events: _Events, maker: EventMaker, shapes: Shapes) -> None:
    index = answer.index
    pending = _PendingLogprobs(shapes)
    opening = maker.opening(index)
    async for piece in answer.pieces():
        pending.add(piece)
        data = opening
        for delta in piece.deltas:
            data += maker.delta(index, delta, pending.take())
        for call in piece.calls:
            data += maker.call(index, call, pending.take())
        if data is not opening:
            opening = b""
            await events.write(data)
    await events.write(opening + maker.closing(index, answer.finish_reason, pending.take()))


async def _collect(answer: Answer, shapes: Shapes) -> WholeChoice:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCallMade] = []
    pending = _PendingLogprobs(shapes)
    async for piece in answer.pieces():
        pending.add(piece)
        calls += piece.calls
        for delta in piece.deltas:
            (content if delta.kind == "content" else reasoning).append(delta.text)
    return WholeChoice(
        answer.index,
        answer.finish_reason,
        "".join(content),
        "".join(reasoning),
        calls,
        pending.take(whole=True),
    )


class _PendingLogprobs:
    """Logprobs of tokens whose text has not come out yet: they go with the next text that does."""

    def __init__(self, shapes: Shapes) -> None:
        self._shape = shapes() if shapes else None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, piece: Piece) -> None:
        if self._shape is not None and piece.logprobs:
            self._tokens += piece.tokens
            self._logprobs += piece.logprobs

    def take(self, *, whole: bool = False) -> object:
        if self._shape is None or not (self._tokens or whole):
            return None
        shaped = self._shape.shaped(self._tokens, self._logprobs)
        self._tokens, self._logprobs = [], []
        return shaped


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
    }  # fmt: skip
