"""Many streams read by one task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient, AsyncGroup, TokenChunk
from zmqengine_client.errors import BadRequest


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """A worker that makes a step every five milliseconds."""
    with FakeWorker(FakeEngineConfig(step_ms=5)) as worker:
        yield worker


def test_streams_join_while_others_are_read(worker: FakeWorker) -> None:
    """Each gives all of its tokens and one end; those of one step come out of one `wait`."""

    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            group: AsyncGroup[TokenChunk] = AsyncGroup()
            numbers: dict[Any, int] = {
                client.generate_tokens([number + 1], max_tokens=20, seed=0): number for number in range(8)
            }
            for stream in numbers:
                group.add(stream)
            tokens: dict[int, list[int]] = {number: [] for number in range(9)}
            ended: list[int] = []
            most, late = 0, False
            while len(ended) < 9:
                news = await asyncio.wait_for(group.wait(), 60)
                most = max(most, len(news))
                for one in news:
                    number = numbers[one.stream]
                    tokens[number] += one.chunk.tokens if one.chunk is not None else []
                    if one.ended:
                        ended.append(number)
                if not late:
                    late = True
                    stream = client.generate_tokens([9], max_tokens=20, seed=0)
                    numbers[stream] = 8
                    group.add(stream)
            assert sorted(ended) == list(range(9))
            assert len(group) == 0
            assert most > 1
            for number in range(9):
                assert tokens[number] == worker.expected_tokens([number + 1], 20)

    asyncio.run(main())


def test_a_failure_is_an_end_and_is_raised_by_the_result(worker: FakeWorker) -> None:
    """`wait` itself raises nothing of the streams, and says nothing of one that was discarded."""

    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            group: AsyncGroup[TokenChunk] = AsyncGroup()
            bad, left = client.generate_tokens([5], temperature=-1), client.generate_tokens([5], max_tokens=3)
            group.add(left)
            group.discard(left)
            group.add(bad)
            (news,) = await asyncio.wait_for(group.wait(), 60)
            assert (news.stream, news.chunk, news.ended) == (bad, None, True)
            with pytest.raises(BadRequest):
                _ = bad.result
            assert (await left.read()).finish == "length"

    asyncio.run(main())
