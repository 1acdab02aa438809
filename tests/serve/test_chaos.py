"""Random wants, loads, unloads and kills, also of the launcher, on real processes: every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import psutil
import pytest

from tests.serve.launching import LauncherProcess, fake, toml
from zmqengine.errors import Unavailable, ZmqEngineError
from zmqengine.protocol.launcher import ModelList
from zmqengine_client import AsyncClient
from zmqengine_client.launcher import AsyncLauncher

pytestmark = pytest.mark.process

SPAN_S = float(os.environ.get("ZMQENGINE_CHAOS_SECONDS", "40"))
USERS = 6
NAMES = ("a", "b", "c")
TOKENS = 40


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_whatever_is_killed(seed: int) -> None:
    """Six programs ask for three models of which two fit. Workers are killed, models loaded and unloaded by command,
    and the launcher is killed and started again: no request is lost or has a wrong token, nothing is over budget."""
    draw = random.Random(seed)
    # A worker that is killed at random is not one that fails.
    models = {name: {**fake(4, step_ms=3, vocab_size=5000), "restarts-max": 1000} for name in NAMES}
    finished: list[str] = []

    with LauncherProcess(toml(models, memory="9G")) as launched:

        async def use(number: int, until_s: float) -> None:
            loop = asyncio.get_running_loop()
            # Each model has a first user, however few requests end in time.
            name = NAMES[number % len(NAMES)]
            while loop.time() < until_s:
                async with AsyncClient(
                    launched.address, model=name, connect_timeout_s=60, worker_lost_timeout_s=60
                ) as client:
                    stream = client.generate_tokens([number + 1], max_tokens=TOKENS, seed=number)
                    tokens = [token async for chunk in stream for token in chunk.tokens]
                    assert len(tokens) == TOKENS
                    # The engine makes its tokens of prompt and seed alone, whichever process it is.
                    assert made.setdefault(number, tokens) == tokens
                    finished.append(name)
                name = draw.choice(NAMES)

        async def disturb(launcher: AsyncLauncher, until_s: float) -> None:
            loop = asyncio.get_running_loop()
            while loop.time() < until_s:
                await asyncio.sleep(draw.uniform(0.2, 1.5))
                kind, name = draw.random(), draw.choice(NAMES)
                with contextlib.suppress(Unavailable):
                    if kind < 0.3:
                        entries = {entry.name: entry for entry in (await listed(launcher)).models}
                        if entries[name].pid:
                            with contextlib.suppress(psutil.Error):
                                psutil.Process(entries[name].pid).kill()
                    elif kind < 0.5:
                        await launcher.unload(name)
                    elif kind < 0.75:
                        with contextlib.suppress(ZmqEngineError):
                            await launcher.load(name)
                    elif kind < 0.85:
                        await asyncio.to_thread(launched.kill)
                        launched.start_again()

        async def listed(launcher: AsyncLauncher) -> ModelList:
            found = await launcher.models()
            assert found.reserved_bytes <= found.budget_bytes
            return found

        async def run() -> None:
            async with launched.client() as launcher:
                until_s = asyncio.get_running_loop().time() + SPAN_S
                users = [asyncio.create_task(use(number, until_s)) for number in range(USERS)]
                await disturb(launcher, until_s)
                await asyncio.wait_for(asyncio.gather(*users), 200)
                final = await listed(launcher)
                assert not any(entry.waiting for entry in final.models)

        made: dict[int, list[int]] = {}
        asyncio.run(run())
        assert set(finished) == set(NAMES)
        assert launched.terminate() == 0
        assert launched.all_processes() == []
