"""The benchmark's own gateway."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")

from zmqengine.bench.load.prompts import prompts_for
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.http_target import HttpSession
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_a_run_starts_a_gateway() -> None:
    """It answers, and knows the processes whose CPU time is its own."""
    plan = StartPlan(model="pico", worker=False, smg=True, engine=f"fake:{FakeEngineConfig().to_json()}")

    async def main() -> None:
        async with started(plan) as targets:
            assert [target.label for target in targets] == ["smg"]
            for target in targets:
                assert len(set(target.pids)) == 3
                session = HttpSession(target, timeout_s=60.0)
                record = (await session.send(prompts_for(None, "1").request(8, 5)).outcome()).record()
                await session.close()
                assert record.error == ""
                assert record.completed

    asyncio.run(main())
