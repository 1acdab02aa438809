"""The requests of one gateway connection: started, aborted, and their new tokens sent in one message per
wake-up."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from zmqengine_client import AsyncGroup, AsyncTokenStream, TokenChunk
from zmqengine_client.aio.streams import AsyncStream
from zmqengine_client.errors import BadRequest
from zmqengine_smg.upstream import Upstream
from zmqengine_smg.zmq_link import EngineLink
from zmqengine_smg.zmq_messages import (
    ABORT,
    ADD,
    ERROR,
    START_WAVE,
    UTILITY,
    Add,
    Output,
    Outputs,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from zmqengine_smg.zmq_requests import end_tokens, read_add
from zmqengine_smg.zmq_responses import output, refusal, scheduler_stats

log = logging.getLogger("zmqengine.smg")

LOAD_S = 1.0


@dataclass(frozen=True, slots=True)
class _Running:
    id: str
    stream: AsyncTokenStream
    prompt_tokens: int
    stop_token_ids: frozenset[int]


class EngineConnection:
    """Serves the messages of one link. With `draining` set, new requests are refused."""

    def __init__(self, link: EngineLink, upstream: Upstream) -> None:
        self.draining = False
        self._link = link
        self._upstream = upstream
        self._group: AsyncGroup[TokenChunk] = AsyncGroup()
        self._by_id: dict[str, _Running] = {}
        self._by_stream: dict[AsyncStream[TokenChunk], _Running] = {}
        self._told: SchedulerStats | None = None

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    async def run(self) -> None:
        """Receive, publish and report the load, until cancelled or one of the three fails."""
        tasks = [asyncio.create_task(work) for work in (self._receive(), self._publish(), self._tell_load())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Abort all running requests."""
        for running in list(self._by_id.values()):
            self._forget(running)
            running.stream.close()

    async def _receive(self) -> None:
        while True:
            kind, *bodies = await self._link.receive()
            body = bodies[0] if bodies else b""
            try:
                if kind == ADD:
                    await self._add(body)
                elif kind == ABORT:
                    self._abort(msgspec.msgpack.decode(body, type=list[str]))
                elif kind == UTILITY:
                    await self._refuse_call(msgspec.msgpack.decode(body, type=UtilityCall))
                elif kind != START_WAVE:
                    log.warning("the gateway sent a message of unknown kind %r", kind[:16])
            except msgspec.MsgspecError as error:
                log.warning("the gateway sent a malformed message: %s", error)

    async def _add(self, body: bytes) -> None:
        try:
            add = msgspec.msgpack.decode(body, type=Add)
        except msgspec.ValidationError as error:
            await self._refuse(_request_id(body), str(error))
            return
        if add.abort_immediately or add.request_id in self._by_id:
            return
        try:
            if self.draining:
                raise BadRequest("the engine is draining: send the request to another one")
            assert self._upstream.model is not None, "connected once the model is known"
            prompt, options = read_add(add, self._upstream.model.limits.context_tokens_max)
        except BadRequest as error:
            await self._refuse(add.request_id, error.message)
            return
        stream = self._upstream.client.generate_tokens(prompt, **options)
        running = _Running(add.request_id, stream, len(prompt), end_tokens(add))
        self._by_id[running.id] = self._by_stream[stream] = running
        self._group.add(stream)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            running = self._by_id.get(request_id)
            if running is not None:
                self._forget(running)
                running.stream.close()

    def _forget(self, running: _Running) -> None:
        self._group.discard(running.stream)
        del self._by_id[running.id]
        del self._by_stream[running.stream]

    async def _publish(self) -> None:
        while True:
            outputs = []
            for news in await self._group.wait():
                running = self._by_stream[news.stream]
                outputs.append(
                    output(running.id, news.stream, news.chunk, running.stop_token_ids, running.prompt_tokens)
                )
                if news.ended:
                    self._forget(running)
                    if outputs[-1].finish_reason == ERROR:
                        log.warning("request %s failed: %s", running.id, outputs[-1].stop_reason)
            await self._send(outputs)

    async def _tell_load(self) -> None:
        while True:
            if self._load() != self._told:
                await self._send([])
            await asyncio.sleep(LOAD_S)

    async def _refuse_call(self, call: UtilityCall) -> None:
        failure = f"{call.method}: this engine has no such method"
        await self._link.send(
            Outputs(timestamp=time.time(), utility_output=UtilityOutput(call.call_id, failure))
        )

    async def _refuse(self, request_id: str, message: str) -> None:
        # The gateway refers its users to this log: it shows no text of the wire's errors.
        log.warning("request %s is refused: %s", request_id, message)
        await self._send([refusal(request_id, message)])

    async def _send(self, outputs: list[Output]) -> None:
        load = self._load()
        news = None if load == self._told else load
        self._told = load
        await self._link.send(Outputs(outputs=outputs, scheduler_stats=news, timestamp=time.time()))

    def _load(self) -> SchedulerStats:
        return scheduler_stats(self._upstream.numbers)


def _request_id(body: bytes) -> str:
    """The id of a malformed request. Raises `msgspec.MsgspecError` if that is malformed too."""
    fields = msgspec.msgpack.decode(body, type=list[Any])
    return msgspec.convert(fields[0] if fields else None, str)
