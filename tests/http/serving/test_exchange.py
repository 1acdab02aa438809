"""Work for a client that may leave, whatever server says so."""

from __future__ import annotations

import asyncio

import pytest

from zmqengine_http.serving.exchange import Disconnected, Exchange, Message

SCOPE = {"headers": [], "http_version": "1.1", "method": "POST", "path": "/"}


async def keep(message: Message) -> None:
    """A client that reads nothing."""


async def gone() -> Message:
    """A client that has left, or has got all of its response."""
    return {"type": "http.disconnect"}


def test_a_client_that_left_ends_the_work_and_waits_for_its_clean_up() -> None:
    """And the task that did it is none the worse: it can go on waiting."""

    async def run() -> list[str]:
        exchange, told = Exchange(SCOPE, gone, keep), []

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                told.append("cleaned up")

        with pytest.raises(Disconnected):
            await exchange.unless_gone(work())
        await asyncio.wait_for(asyncio.sleep(0), 60)
        return told

    assert asyncio.run(run()) == ["cleaned up"]


def test_the_end_of_the_response_ends_no_work() -> None:
    """Servers then say `http.disconnect` as well."""

    async def run() -> str:
        exchange = Exchange(SCOPE, gone, keep)
        told = ""

        async def work() -> None:
            nonlocal told
            await exchange.send(200, [], b"answer")
            for _ in range(10):
                await asyncio.sleep(0)
            told = "done"

        await exchange.unless_gone(work())
        return told

    assert asyncio.run(run()) == "done"


def test_who_cancels_the_task_from_outside_is_heeded() -> None:
    """A server that shuts down is no client that left."""

    async def never() -> Message:
        message: Message = await asyncio.get_running_loop().create_future()
        return message

    async def run() -> None:
        exchange = Exchange(SCOPE, never, keep)
        task = asyncio.ensure_future(exchange.unless_gone(asyncio.sleep(60)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
