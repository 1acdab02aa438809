"""Front-ends that die, freeze or fall silent, as real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.front_end import FrontEndProcess
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine_client import Client

pytestmark = pytest.mark.process

FAKE = FakeEngineConfig(step_ms=5.0, context_tokens=1_000_000)
STOPPED_S = float(os.environ.get("ZMQENGINE_STOPPED_S", "20"))


def sessions(client: Client) -> float:
    return client.status().numbers["sessions"]


def running(client: Client) -> float:
    return client.status().numbers["running"]


def test_a_front_end_that_is_killed_frees_its_rows_within_its_grace(
    make_worker: Callable[..., WorkerProcess], make_front_end: Callable[..., FrontEndProcess]
) -> None:
    """mlx-openai-server #321, omlx #2260: whoever gave up does not keep the GPU busy, and others are not disturbed."""
    worker = make_worker(FAKE, grace_ms=300)
    doomed = make_front_end(worker, streams=8, tokens_min=100_000, tokens_max=100_000)
    request = RowRequest(0, [9, 9], 400, seed=4)
    with worker.client() as client:
        client.wait_ready()
        doomed.wait_streaming()
        wait_until(lambda: running(client) == 8, "the front-end's streams do not run")
        stream = client.generate_tokens(request.prompt, max_tokens=400, seed=4)
        next(stream)
        os.kill(doomed.process.pid, signal.SIGKILL)
        # The stream of the living front-end may have ended, too.
        wait_until(lambda: running(client) <= 1, "rows of a dead front-end go on", seconds=60)
        wait_until(lambda: sessions(client) == 1, "the session of a dead front-end stays")
        assert stream.read().tokens == expected_tokens(request)


def test_a_front_end_that_is_frozen_past_its_lease_loses_its_rows(
    make_worker: Callable[..., WorkerProcess], make_front_end: Callable[..., FrontEndProcess]
) -> None:
    """mlx-openai-server, measured: a closed laptop does not hold the GPU.

    Open again, its streams end with `lease` if that answer still reached it, or else go on in a new session.
    """
    worker = make_worker(FAKE, lease_ms=3000)
    frozen = make_front_end(
        worker, streams=2, streams_total=2, tokens_min=1500, tokens_max=1500, fake=FAKE.to_json()
    )
    with worker.client() as client:
        client.wait_ready()
        frozen.wait_streaming()
        wait_until(lambda: running(client) == 2, "the front-end's streams do not run")
        os.kill(frozen.process.pid, signal.SIGSTOP)
        wait_until(lambda: running(client) == 0, "rows of a frozen front-end go on", seconds=60)
    os.kill(frozen.process.pid, signal.SIGCONT)
    tally = frozen.finish()
    assert all(error.startswith("lease") for error in tally.errors)
    assert (tally.streams, tally.missing, tally.repeated, tally.wrong) == (2, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_front_end_stopped_for_20_seconds_loses_nothing(
    make_worker: Callable[..., WorkerProcess], make_front_end: Callable[..., FrontEndProcess]
) -> None:
    """SIGSTOP within its lease: it gets every token after SIGCONT, and meanwhile the others are served."""
    worker = make_worker(FAKE)
    tokens = int(1000 / FAKE.step_ms * (STOPPED_S + 3))
    stopped = make_front_end(
        worker, streams=8, streams_total=8, tokens_min=tokens, tokens_max=tokens, fake=FAKE.to_json()
    )
    with worker.client() as client:
        client.wait_ready()
        stopped.wait_streaming()
        os.kill(stopped.process.pid, signal.SIGSTOP)
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s:
            request = RowRequest(0, [3, 4], 20, seed=1)
            assert client.generate_tokens([3, 4], max_tokens=20, seed=1).read().tokens == expected_tokens(
                request
            )
        wait_until(lambda: running(client) == 8, "the stopped front-end's streams do not run")
    os.kill(stopped.process.pid, signal.SIGCONT)
    tally = stopped.finish()
    assert tally.errors == []
    assert (tally.streams, tally.missing, tally.repeated, tally.wrong) == (8, 0, 0, 0)
