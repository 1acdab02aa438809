"""A worker that hangs is ended by its watchdog, and the streams go on in the next one."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.workers import START_S, WorkerProcess
from zmqengine.engine.fake_engine import FakeEngineConfig, FakeFault, FaultAction, expected_tokens
from zmqengine.engine.interface import RowRequest


@pytest.mark.parametrize("action", ["block", "hang", "spin", "exit"])
def test_a_pass_that_never_ends_is_a_pause(
    make_worker: Callable[..., WorkerProcess], action: FaultAction
) -> None:
    """mlx-lm #1505, #1834: blocked, blocked in C, spinning with the interpreter lock, or gone: same tokens."""
    # Each life of the worker makes 40 steps; the streams need three.
    fake = FakeEngineConfig(faults=(FakeFault(place="next", action=action, index=40),))
    worker = make_worker(fake, pass_timeout_s=0.5, restart_wait_ms=1)
    requests = [RowRequest(row, [row + 1, 7], 100, seed=row) for row in range(4)]
    with worker.client() as client:
        streams = [
            client.generate_tokens(request.prompt, max_tokens=100, seed=request.seed) for request in requests
        ]
        for request, stream in zip(requests, streams, strict=True):
            assert stream.read().tokens == expected_tokens(request)
            assert stream.result.resumed >= 2
    if action != "exit":
        assert "fake_engine.py" in worker.log, "the stacks are in the log"


def test_control_answers_while_a_step_takes_long(make_worker: Callable[..., WorkerProcess]) -> None:
    """vllm-mlx #593: describe, status and ping do not wait for a step, and status tells the age of the pass."""
    fake = FakeEngineConfig(faults=(FakeFault(place="next", action="hang", index=10),))
    worker = make_worker(fake, pass_timeout_s=0, supervise=False)
    with worker.client() as client:
        stream = client.generate_tokens([1, 2, 3], max_tokens=50)
        while (status := client.status()).pass_age_ms < 300:
            assert client.ping() < 10
        assert status.state == client.describe().state == "ready"
        stream.abort()


def test_a_warm_up_that_hangs_is_ended() -> None:
    """Loading is watched by its progress: a worker that stands still there does not say `warming` for good."""
    fake = FakeEngineConfig(faults=(FakeFault(place="insert", action="hang"),))
    with WorkerProcess(fake, supervise=False, load_timeout_s=1.0) as worker:
        assert worker.process.wait(START_S) == -signal.SIGALRM
        assert "warm_up" in worker.log


@pytest.mark.parametrize("action", ["exit", "hang"])
def test_a_worker_that_dies_at_every_start_of_work_is_given_up(
    make_worker: Callable[..., WorkerProcess], action: FaultAction
) -> None:
    """smg servicer: bounded retries, then a non-zero exit and one clear last line; no client waits for ever."""
    fake = FakeEngineConfig(faults=(FakeFault(place="next", action=action, token=666),))
    worker = make_worker(fake, pass_timeout_s=0.3, restart_wait_ms=1, restarts_max=2)
    with worker.client(worker_lost_timeout_s=5.0) as client:
        poison = client.generate_tokens([666], max_tokens=50)
        with pytest.raises(Exception, match=r"worker|Worker") as caught:
            poison.read()
        assert getattr(caught.value, "code", "") == "worker_lost"
    assert worker.process.wait(30) == 1
    assert "giving up" in worker.log.splitlines()[-1]
