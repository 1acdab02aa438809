"""The screen, driven by keys, over real workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient, Client
from zmqengine_top.app import Top

WAIT_S = 60.0
Script = Callable[[Top, Pilot[None]], Awaitable[None]]


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """One row, and requests long enough to outlast a test."""
    with FakeWorker(FakeEngineConfig(step_ms=5, rows_max=1, context_tokens=100_000), process=True) as worker:
        yield worker


def drive(address: str, script: Script, size: tuple[int, int] = (80, 24), *, answer_s: float = 0.5) -> None:
    """Run the screen at this size, and the script on it. A worker is silent that does not answer for `answer_s`: on a
    busy machine any may be for half a second."""

    async def run() -> None:
        client = AsyncClient(address, name="top", connect_timeout_s=0.5, answer_timeout_s=answer_s)
        app = Top([("w", client)], every_s=0.1)
        try:
            async with app.run_test(size=size) as pilot:
                await script(app, pilot)
        finally:
            await client.close()

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str) -> None:
    """Let the screen go on until the condition holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        await pilot.pause(0.02)


def cells(app: Top, table: str) -> list[list[str]]:
    """The text of a table, row by row."""
    shown = app.query_one(f"#{table}", DataTable)
    return [[str(cell) for cell in shown.get_row_at(row)] for row in range(shown.row_count)]


def visible(app: Top) -> list[str]:
    """What is on the screen, line by line."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def test_requests_are_shown_ended_and_the_worker_drained_by_keys(worker: FakeWorker) -> None:
    """`a` and `y` end the request under the cursor; `d` and `n` drain nothing, `d` and `y` do."""
    with Client(worker.address, name="a front-end", connect_timeout_s=WAIT_S) as client:
        stream = client.generate_tokens([5, 6, 7], max_tokens=90_000, request_id="first", ignore_eos=True)
        tokens = iter(stream)
        next(tokens)
        waiting = client.generate_tokens([5, 6, 7], max_tokens=90_000, request_id="second", ignore_eos=True)

        async def script(app: Top, pilot: Pilot[None]) -> None:
            await until(pilot, lambda: len(cells(app, "requests")) == 2, "two requests")
            running, queued = cells(app, "requests")
            assert running[:3] == ["first", "a front-end", "decode"]
            assert queued[:3] == ["second", "a front-end", "waits: row"]
            await until(pilot, lambda: "Quit" in visible(app)[-1], "the keys are named")
            await until(
                pilot,
                lambda: any("first" in line and "90,000" in line for line in visible(app)),
                "the request is on the screen, with its last column",
            )
            assert app.query_one("#requests", DataTable).virtual_size.width <= 80, (
                "the last column is cut off"
            )
            lines = visible(app)
            assert (len(lines), {len(line) for line in lines}) == (24, {80})
            await pilot.press("a", "y")
            await until(
                pilot, lambda: [row[0] for row in cells(app, "requests")] == ["second"], "the first ended"
            )
            await pilot.press("d", "n")
            await pilot.press("f")
            await until(pilot, lambda: cells(app, "sessions"), "front-ends")
            assert cells(app, "sessions")[0][0] == "a front-end"
            await pilot.press("f", "d", "y")
            await until(
                pilot, lambda: cells(app, "workers")[0][1].startswith(("draining", "silent")), "it drains"
            )

        drive(worker.address, script)
        for _ in tokens:
            pass
        assert stream.result.finish == "abort"
        waiting.close()


def test_sorting_keeps_the_cursor_on_its_request(worker: FakeWorker) -> None:
    """`s` goes through the orders; the message line names the one in force."""
    with Client(worker.address, connect_timeout_s=WAIT_S) as client:
        streams = [
            client.generate_tokens([1] * length, max_tokens=90_000, request_id=f"r{length}", ignore_eos=True)
            for length in (3, 9, 6)
        ]

        async def script(app: Top, pilot: Pilot[None]) -> None:
            await until(pilot, lambda: len(cells(app, "requests")) == 3, "three requests")
            table = app.query_one("#requests", DataTable)
            await pilot.press("home")
            chosen = cells(app, "requests")[table.cursor_row][0]
            message = app.query_one("#message", Static)
            while "by prompt" not in str(message.render()):
                await pilot.press("s")
            assert [row[0] for row in cells(app, "requests")] == ["r9", "r6", "r3"]
            assert cells(app, "requests")[table.cursor_row][0] == chosen

        drive(worker.address, script, answer_s=WAIT_S)
        for stream in streams:
            stream.close()


def test_it_can_be_read_right_after_a_resize(worker: FakeWorker) -> None:
    """Narrower, wider, and lower."""

    async def script(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: cells(app, "workers")[0][1].startswith("ready"), "the worker is seen")
        for width, height in ((60, 20), (140, 40), (80, 12)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            lines = visible(app)
            assert (len(lines), {len(line) for line in lines}) == (height, {width})
            assert any("ready" in line for line in lines), lines

    drive(worker.address, script, answer_s=WAIT_S)


def test_a_worker_dies_and_comes_back_on_the_same_screen(worker: FakeWorker) -> None:
    """Silent meanwhile, with its model still named."""

    async def script(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: cells(app, "workers")[0][1].startswith("ready"), "the worker is seen")
        worker.kill()
        await until(pilot, lambda: cells(app, "workers")[0][1].startswith("silent"), "its death is seen")
        assert cells(app, "workers")[0][2] == "fake"
        await asyncio.to_thread(worker.start)
        await until(pilot, lambda: cells(app, "workers")[0][1].startswith("ready"), "it is back")

    drive(worker.address, script)
