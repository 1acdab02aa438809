"""Load on a session: closed loop, closed loop with think times, open loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.sse import CountTokens
from zmqengine.bench.targets.target import TargetOutcome, TargetSession, TargetStream


async def closed_loop(
    session: TargetSession, requests: Sequence[RequestSpec], users: int
) -> list[TargetOutcome]:
    """Each of `users` sends its next request as soon as the last one has ended."""
    waiting = iter(requests)
    outcomes: list[TargetOutcome] = []

    async def one_user() -> None:
        for request in waiting:
            outcomes.append(await session.send(request).outcome())

    with collector_off():
        await asyncio.gather(*(one_user() for _ in range(users)))
    return outcomes


async def thinking_users(
    session: TargetSession, requests: Sequence[Sequence[RequestSpec]], think_s: Sequence[Sequence[float]]
) -> list[TargetOutcome]:
    """As `closed_loop`, with own requests for each user and a think time before each of them."""
    outcomes: list[TargetOutcome] = []

    async def one_user(own: Sequence[RequestSpec], pauses_s: Sequence[float]) -> None:
        for request, pause_s in zip(own, pauses_s, strict=True):
            await asyncio.sleep(pause_s)
            outcomes.append(await session.send(request).outcome())

    with collector_off():
        await asyncio.gather(*map(one_user, requests, think_s))
    return outcomes


async def open_loop(
    session: TargetSession, requests: Sequence[RequestSpec], arrival_s: Sequence[float]
) -> list[TargetOutcome]:
    """Send each request at its arrival time, independent of earlier ones. Outcomes in the order of requests."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    streams: list[TargetStream] = []
    with collector_off():
        for request, at_s in zip(requests, arrival_s, strict=True):
            await asyncio.sleep(start_s + at_s - loop.time())
            streams.append(session.send(request))
        return await outcomes_of(streams)


async def outcomes_of(streams: Sequence[TargetStream]) -> list[TargetOutcome]:
    """The outcomes of streams, in their order."""
    return list(await asyncio.gather(*(stream.outcome() for stream in streams)))


def records_of(outcomes: Sequence[TargetOutcome], count_tokens: CountTokens | None) -> list[RequestRecord]:
    """Records of outcomes, parsed after the measurement."""
    return [outcome.record(count_tokens) for outcome in outcomes]


@asynccontextmanager
async def streams_in_flight(
    session: TargetSession, requests: Sequence[RequestSpec]
) -> AsyncIterator[list[TargetStream]]:
    """Streams that are cancelled, if they still run, at the end of the block."""
    streams = [session.send(request) for request in requests]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.cancel()
        await outcomes_of(streams)


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection, whose pauses would count as inter-token latency."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
