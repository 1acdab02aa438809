"""Several targets in turn, against servers that say what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tests.bench.sse_server import CLOSE, SseServer
from zmqengine.bench.load.prompts import prompts_for
from zmqengine.bench.options import SMALL
from zmqengine.bench.reports.report import Cell, errors_of, failures_of
from zmqengine.bench.rounds import Runner
from zmqengine.bench.scenarios import scenario_named
from zmqengine.bench.targets.target import TargetError, TargetSpec


async def measure(
    scenario: str, servers: Sequence[SseServer], rounds: int, *, warm_up: bool = True
) -> list[Cell]:
    async with AsyncExitStack() as stack:
        targets = []
        for name, server in zip("abc", servers, strict=False):
            await stack.enter_async_context(server.running())
            targets.append(TargetSpec(label=name, kind="http", address=server.url, model="m"))
        runner = Runner(targets, prompts_for(None, "x"), SMALL, seed=1, on_progress=lambda text: None)
        if warm_up:
            await runner.warm_up()
        return await runner.run(scenario_named(scenario), rounds)


def server(*script: object) -> SseServer:
    return SseServer({"m": script or (" a", " b")})


def test_targets_take_turns_round_by_round() -> None:
    """A B C, A B C: so each pair was measured in neighbouring moments."""
    cells = asyncio.run(measure("users", [server(), server(), server()], rounds=2))
    assert [(cell.case, cell.round, cell.target) for cell in cells] == [
        (case, number, target) for case in ("1", "4") for number in (0, 1) for target in "abc"
    ]
    assert errors_of(cells) == []


def test_every_measurement_has_prompts_of_its_own() -> None:
    """A cache of prompts helps nobody: neither between rounds, nor between targets with one server behind them."""
    servers = [server(), server()]
    asyncio.run(measure("users", servers, rounds=2, warm_up=False))
    prompts = [request["prompt"] for each in servers for request in each.requests]
    assert len(prompts) == len(set(prompts)) == 2 * 2 * (SMALL.requests_min + 4)


def test_warm_up_tells_which_target_does_not_work() -> None:
    """Before anything is measured."""
    with pytest.raises(TargetError, match=r"b: connection closed"):
        asyncio.run(measure("users", [server(), server(" a", CLOSE)], rounds=1))


def test_errors_of_a_target_are_counted_and_the_others_go_on() -> None:
    """A server that cuts every answer short has errors and no completed request."""
    cells = asyncio.run(measure("users", [server(" a", CLOSE), server()], rounds=1, warm_up=False))
    for cell in cells:
        broken = cell.target == "a"
        assert cell.measures["errors"] == (cell.measures["requests"] if broken else 0)
        assert cell.measures["completed"] == (0 if broken else cell.measures["requests"])
        assert sum(cell.failures.values()) == cell.measures["errors"]
    lines = failures_of(cells)
    assert len(lines) == 2
    assert lines[0].startswith("users, 1, a: connection closed by the server")


def test_a_scenario_that_cannot_be_run_says_why() -> None:
    """A stream that ends before the long prompt can be sent: no figure, and no crash."""
    (cell,) = asyncio.run(measure("interference", [server(0.0)], rounds=1, warm_up=False))
    assert "ended before" in cell.error
    assert cell.measures == {}
