"""Both clients when the worker dies, freezes, comes late or moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.workers import START_S
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault
from zmqengine.errors import WorkerLost
from zmqengine.testing import FakeWorker
from zmqengine_client.core import liveness
from zmqengine_client.core.session import ClientSession

pytestmark = pytest.mark.process

Connect = Callable[..., Any]
either = pytest.mark.parametrize("connect", ["async"], indirect=True)
"""What only the core decides, which is the same behind both clients: once is enough."""

STANDS_STILL = FakeEngineConfig(step_ms=1.0, faults=(FakeFault(place="next", action="hang", index=200),))
"""At its 200th step: what needs more is not over before it is killed, however late that is."""


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """A worker process that can be killed."""
    with FakeWorker(FakeEngineConfig(step_ms=2.0), process=True) as worker:
        yield worker


async def read_all(client: Any, streams: list[Any]) -> None:
    """Read many streams in one task."""
    async for _ in client.select(streams):
        continue


def test_a_killed_worker_is_a_pause_for_32_streams(connect: Connect) -> None:
    """mlx-lm #854: an abort of the process is a pause. SIGKILL after SIGKILL: the tokens are those without a crash."""
    # Each stream needs three lives, however late it begins.
    tokens = 450

    async def scenario(worker: FakeWorker) -> None:
        events: list[str] = []
        kills = 0
        async with connect(worker.address, on_event=lambda event: events.append(event.kind)) as client:
            streams = [client.generate_tokens([1, number], max_tokens=tokens) for number in range(32)]
            reading = asyncio.ensure_future(read_all(client, streams))
            while not reading.done():
                status = await client.status()
                if status.pass_age_ms > 200 and status.numbers["running"]:
                    await asyncio.to_thread(worker.restart)
                    kills += 1
                await asyncio.sleep(0.01)
            await reading
            for number, result in enumerate(stream.result for stream in streams):
                assert result.tokens == worker.expected_tokens([1, number], tokens, seed=result.seed)
                assert result.resumed >= 2
            counters = client.counters
            assert counters.worker_restarts == events.count("restarted") == kills
            resumed = sum(stream.result.resumed for stream in streams)
            assert counters.resumed_streams == events.count("resumed") == resumed

    with FakeWorker(STANDS_STILL, process=True, pass_timeout_s=0) as worker:
        asyncio.run(asyncio.wait_for(scenario(worker), 100))


def test_text_goes_on_in_the_middle_of_a_character(connect: Connect) -> None:
    """A death between the bytes of a character changes nothing in the text."""

    async def scenario(worker: FakeWorker) -> None:
        async with connect(worker.address) as client:
            tokenizer = await client.tokenizer()
            stream = client.generate("x", max_tokens=300, seed=4)
            await stream.__anext__()
            await asyncio.to_thread(worker.restart, FakeEngineConfig())
            text = await stream.text()
            assert stream.result.resumed == 1
            expected = worker.expected_tokens(tokenizer.encode("x"), 300, seed=4)
            assert stream.result.tokens == expected
            assert text == tokenizer.decode(expected)

    with FakeWorker(STANDS_STILL, process=True, pass_timeout_s=0) as worker:
        asyncio.run(scenario(worker))


@either
def test_without_resume_a_death_is_worker_lost_with_what_there_is(
    connect: Connect, worker: FakeWorker
) -> None:
    """`resume=False`, for those who would rather decide themselves."""

    async def scenario() -> None:
        async with connect(worker.address, resume=False) as client:
            stream = client.generate_tokens([1], max_tokens=4000, seed=1)
            await stream.__anext__()
            await asyncio.to_thread(worker.restart)
            with pytest.raises(WorkerLost) as caught:
                await stream.read()
            tokens = caught.value.completion.tokens  # type: ignore[attr-defined]
            assert tokens == worker.expected_tokens([1], len(tokens), seed=1)
            assert len((await client.generate_tokens([1], max_tokens=5).read()).tokens) == 5

    asyncio.run(scenario())


@either
def test_a_worker_that_does_not_come_back_is_worker_lost_in_time(
    connect: Connect, worker: FakeWorker
) -> None:
    """No connection and no supervisor: the stream ends after `worker_lost_timeout_s`."""

    async def scenario() -> None:
        async with connect(worker.address, worker_lost_timeout_s=0.5) as client:
            stream = client.generate_tokens([1], max_tokens=4000)
            await stream.__anext__()
            await asyncio.to_thread(worker.kill)
            with pytest.raises(WorkerLost, match="zmqengine worker"):
                await stream.read()

    asyncio.run(scenario())


@either
def test_a_frozen_worker_is_worker_lost_in_time(
    connect: Connect, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm #1505: deadlocked, and healthy by the look of its connections. Silence is what counts."""
    monkeypatch.setattr(liveness, "SILENCE_S", 2.0)

    async def scenario() -> None:
        async with connect(worker.address, worker_lost_timeout_s=3.0) as client:
            stream = client.generate_tokens([1], max_tokens=4000)
            await stream.__anext__()
            worker.freeze()
            with pytest.raises(WorkerLost):
                await stream.read()
            worker.thaw()
            assert len((await client.generate_tokens([2], max_tokens=5).read()).tokens) == 5

    asyncio.run(scenario())


@either
def test_a_worker_frozen_for_a_while_loses_nothing(connect: Connect, worker: FakeWorker) -> None:
    """The stream waits and goes on."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=300, seed=1)
            await stream.__anext__()
            worker.freeze()
            await asyncio.sleep(1.0)
            worker.thaw()
            result = await stream.read()
            assert result.tokens == worker.expected_tokens([1], 300, seed=1)
            assert result.resumed == 0

    asyncio.run(scenario())


@either
def test_a_client_may_be_there_before_its_worker(connect: Connect) -> None:
    """Front-ends and worker start in any order, where the front-end says how long it waits."""
    late = FakeWorker(process=True)

    async def scenario() -> None:
        async with connect(late.address, connect_timeout_s=START_S) as client:
            reading = asyncio.ensure_future(client.generate_tokens([1], max_tokens=5).read())
            describing = asyncio.ensure_future(client.describe())
            await asyncio.sleep(0.5)
            await asyncio.to_thread(late.start)
            assert len((await reading).tokens) == 5
            assert (await describing).name

    try:
        asyncio.run(scenario())
    finally:
        late.__exit__()


def test_over_tcp_everything_is_the_same(connect: Connect) -> None:
    """Heartbeats and ports instead of files; a restart at the same address included."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with FakeWorker(STANDS_STILL, process=True, bind=address, pass_timeout_s=0) as worker:

        async def scenario() -> None:
            async with connect(worker.address) as client:
                stream = client.generate_tokens([1], max_tokens=300, seed=1)
                await stream.__anext__()
                await asyncio.to_thread(worker.restart, FakeEngineConfig())
                result = await stream.read()
                assert result.tokens == worker.expected_tokens([1], 300, seed=1)
                assert result.resumed == 1

        asyncio.run(scenario())


@either
def test_an_idle_client_finds_the_next_worker(connect: Connect, worker: FakeWorker) -> None:
    """A restart between two requests is nobody's business."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            await client.generate_tokens([1], max_tokens=5).read()
            await asyncio.to_thread(worker.restart)
            result = await client.generate_tokens([1], max_tokens=5, seed=0).read()
            assert result.tokens == worker.expected_tokens([1], 5)
            assert result.resumed == 0

    asyncio.run(scenario())


def test_an_idle_client_does_not_spin(
    connect: Connect, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an idle session nor one whose worker is gone. Turns are counted, as time is others' too."""
    turns = 0
    advance = ClientSession.advance

    def counted(session: ClientSession, now: float) -> None:
        nonlocal turns
        turns += 1
        advance(session, now)

    monkeypatch.setattr(ClientSession, "advance", counted)

    async def scenario() -> None:
        nonlocal turns
        async with connect(worker.address) as client:
            await client.generate_tokens([1], max_tokens=5).read()
            for _ in range(2):
                turns = 0
                await asyncio.sleep(0.5)
                assert turns < 50
                await asyncio.to_thread(worker.kill)

    asyncio.run(scenario())


def test_a_loop_over_many_streams_that_is_left_loses_no_chunk(connect: Connect, worker: FakeWorker) -> None:
    """Left and begun again after every chunk: each stream has every token."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            streams = {
                client.generate_tokens([1, number], max_tokens=40, seed=0): number for number in range(8)
            }
            tokens: dict[int, list[int]] = {number: [] for number in streams.values()}
            reading = set(streams)
            while reading:
                async for stream, chunk in client.select(list(reading)):
                    if chunk is None:
                        reading.discard(stream)
                    else:
                        assert chunk.first_index == len(tokens[streams[stream]])
                        tokens[streams[stream]] += chunk.tokens
                    break
        for number, got in tokens.items():
            assert got == worker.expected_tokens([1, number], 40)

    asyncio.run(scenario())
