"""A worker that hangs is ended by its watchdog, and the streams go on in the next one."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.workers import START_S, WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.fake.fake_faults import FaultAction
from zmqengine.engine.interface import RowRequest
from zmqengine_client.errors import WorkerLost

pytestmark = pytest.mark.process


@pytest.mark.parametrize("action", ["block", "hang", "spin", "exit"])
def test_a_pass_that_never_ends_is_a_pause(
    make_worker: Callable[..., WorkerProcess], action: FaultAction
) -> None:
    """mlx-lm #1505, #1834: blocked, blocked in C, spinning with the interpreter lock, or gone: same tokens."""
    # Each life of the worker makes 40 steps; the streams need three. A step takes as long as on a small model, so that
    # a life sends tokens before it ends: one that ends at once takes those along that the socket has not sent.
    fake = FakeEngineConfig(step_ms=5.0, faults=(FakeFault(place="next", action=action, index=40),))
    # A fault that spins holds the interpreter lock for ten time-outs; a pass that a busy machine delays costs a
    # restart.
    worker = make_worker(
        fake, pass_timeout_s=0.2, restart_wait_ms=1, restart_wait_max_ms=1, restarts_max=10_000
    )
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
        next(stream)
        wait_until(lambda: client.status().pass_age_ms >= 300, "the step does not hang")
        assert client.ping() < START_S
        assert client.status().state == client.describe().state == "ready"
        stream.abort()


def test_a_warm_up_that_hangs_is_ended() -> None:
    """Loading is watched by its progress: a worker that stands still there does not say `warming` for good."""
    fake = FakeEngineConfig(faults=(FakeFault(place="insert", action="hang"),))
    # On a loaded machine an earlier part of loading may take longer than a short bound.
    for load_timeout_s in (1.0, 5.0, 25.0):
        with WorkerProcess(fake, supervise=False, load_timeout_s=load_timeout_s) as worker:
            assert worker.process.wait(START_S) == -signal.SIGALRM
            if "warm_up" in worker.log:
                return
    pytest.fail(f"it was ended before its warm-up: {worker.log}")


@pytest.mark.parametrize("action", ["exit", "hang"])
def test_a_worker_that_dies_at_every_start_of_work_is_given_up(
    make_worker: Callable[..., WorkerProcess], action: FaultAction
) -> None:
    """smg servicer: bounded retries, then a non-zero exit and one clear last line; no client waits for ever."""
    fake = FakeEngineConfig(
        step_ms=1.0, context_tokens=1_000_000, faults=(FakeFault(place="next", action=action, token=666),)
    )
    worker = make_worker(fake, pass_timeout_s=0.5, restart_wait_ms=1, restarts_max=2)
    # The first brings the poison to every life that comes, however long that takes to start; the second waits a moment.
    with worker.client() as poisoner, worker.client(worker_lost_timeout_s=1.0) as other:
        stream = other.generate_tokens([1], max_tokens=900_000, ignore_eos=True)
        next(stream)
        with poisoner.generate_tokens([666], max_tokens=50):
            assert worker.process.wait(START_S) == 1
        with pytest.raises(WorkerLost):
            stream.read()
    assert "giving up" in worker.log.splitlines()[-1]
