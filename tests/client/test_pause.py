"""The pause between two looks at a worker."""

from __future__ import annotations

import asyncio

import pytest

from zmqengine_client.pause import Pause


def test_news_before_a_pause_end_it_at_its_start() -> None:
    async def run() -> None:
        pause = Pause()
        pause.end()
        await asyncio.wait_for(pause.last(3600), 10)

    asyncio.run(run())


@pytest.mark.parametrize("rounds", range(4))
def test_a_cancellation_with_the_news_is_not_lost(rounds: int) -> None:
    """Rounds of the event loop between the two."""

    async def follow(pause: Pause) -> None:
        while True:
            await pause.last(3600)

    async def run() -> None:
        pause = Pause()
        task = asyncio.create_task(follow(pause))
        await asyncio.sleep(0)
        pause.end()
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert task in done

    asyncio.run(run())
