"""The memory limit, on the real engine, under more requests than fit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.workers import WorkerProcess
from zmqengine.engine.options import Kernels
from zmqengine_client import Client, TokenStream

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("ZMQENGINE_SOAK_SECONDS", "20")) / 6
LIMIT_BYTES = 32 * 2**20
PROMPT_CACHE_BYTES = 4 * 2**20
STREAMS = 28


def new_stream(client: Client, chance: random.Random) -> TokenStream:
    prompt = [chance.randrange(1, 1000) for _ in range(chance.choice([5, 100, 600]))]
    return client.generate_tokens(prompt, max_tokens=chance.choice([20, 60, 150]), ignore_eos=True)


def check_bytes(numbers: Mapping[str, float], peak_at_start: float) -> float:
    """Every byte within its budget, but for the peak of the check at a start; returns how many requests wait."""
    assert numbers["active_bytes"] + numbers["cache_bytes"] <= LIMIT_BYTES
    assert numbers["peak_bytes"] <= max(LIMIT_BYTES, peak_at_start)
    assert numbers["kv_projected_bytes"] <= numbers["kv_bytes_max"]
    assert numbers["prompt_cache_bytes"] <= PROMPT_CACHE_BYTES
    return numbers["queued"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 200)
@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_the_memory_limit_holds_while_more_wait_than_fit(kernels: Kernels) -> None:
    """mlx-lm #854, #1390, #1909: admission keeps every byte within its budget, and whoever has to wait is served."""
    chance = random.Random(5)
    with WorkerProcess(
        None,
        memory_limit_bytes=LIMIT_BYTES,
        prompt_cache_bytes=PROMPT_CACHE_BYTES,
        kernels=kernels,
        supervise=False,
    ) as worker:
        with worker.client() as client:
            client.wait_ready()
            peak_at_start = client.status().numbers["peak_bytes"]
            running: list[Any] = [new_stream(client, chance) for _ in range(STREAMS)]
            # More than is ever free at once under this load: it must not be overtaken for ever.
            running.append(client.generate_tokens([7] * 1000, max_tokens=300, ignore_eos=True))
            finished, queued_most, sampled_s = 0, 0.0, 0.0
            until_s = time.monotonic() + SECONDS
            while running:
                for stream, chunk in client.select(list(running)):
                    if time.monotonic() - sampled_s > 0.05:
                        sampled_s = time.monotonic()
                        queued_most = max(queued_most, check_bytes(client.status().numbers, peak_at_start))
                    if chunk is None:
                        assert stream.result.finish == "length"
                        finished += 1
                        running.remove(stream)
                        if time.monotonic() < until_s:
                            running.append(new_stream(client, chance))
                            # A new round, so that the new stream is among those selected.
                            break
            print(f"{finished} requests, up to {queued_most:.0f} waiting")
            assert queued_most >= 8
        assert worker.terminate() == 0
