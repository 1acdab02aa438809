"""Processes that are stopped and go on (SIGSTOP, a debugger, a laptop's lid): a pause, whichever process it was.

An hour of it is in tests/worker/test_idle.py and tests/soak/test_two_days.py, by a fake clock; here it is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest

pytestmark = pytest.mark.process

FAKE = FakeEngineConfig(step_ms=5.0)
REQUEST = RowRequest(0, [9, 9], 300, seed=4)
STOPPED_S = 2.5
# Its loop stands still until more frames wait than libzmq takes, then past a heartbeat after the worker was killed.
BUSY_PROGRAM = """
import asyncio, os, signal, sys, time
from zmqengine_client import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        pid = (await client.describe()).pid
        stream = client.generate_tokens([9, 9], max_tokens=4000, seed=4)
        await stream.__anext__()
        time.sleep(4)
        os.kill(pid, signal.SIGKILL)
        time.sleep(6)
        print(*(await stream.read()).tokens)

asyncio.run(main())
"""


def stop(pid: int, seconds: float = STOPPED_S) -> None:
    """SIGSTOP for so long; the time is what is tested."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it does not stop")
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def test_a_worker_that_is_stopped_past_every_lease_loses_no_session(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Nobody could be heard meanwhile: the stream goes on in the same session, with the same tokens."""
    # Three times as long as a client on a busy machine may be without a turn.
    worker = make_worker(FAKE, lease_ms=3000, supervise=False)
    with worker.client() as client:
        client.wait_ready()
        stream = client.generate_tokens(REQUEST.prompt, max_tokens=300, seed=4)
        next(stream)
        stop(worker.engine_pid(), 4.0)
        assert stream.read().tokens == expected_tokens(REQUEST)
        # Idle, too.
        stop(worker.engine_pid(), 4.0)
        assert client.generate_tokens(
            REQUEST.prompt, max_tokens=300, seed=4
        ).read().tokens == expected_tokens(REQUEST)
        assert client.counters.worker_restarts == 0
    assert "the worker was interrupted" in worker.log
    assert "lease ran out" not in worker.log


@pytest.mark.slow
def test_a_program_that_is_busy_while_the_worker_dies_goes_on(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Over tcp, with more frames unread than libzmq takes: its heartbeats would end the program then."""
    worker = make_worker(
        FakeEngineConfig(step_ms=1.0, context_tokens=10_000), bind="tcp://127.0.0.1:0", restart_wait_ms=1
    )
    wait_until(lambda: worker.listening_at, "the worker does not listen")
    ran = subprocess.run(
        [sys.executable, "-c", BUSY_PROGRAM, worker.listening_at], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert [int(token) for token in ran.stdout.split()] == expected_tokens(
        RowRequest(0, [9, 9], 4000, seed=4)
    )


def test_a_worker_that_is_stopped_past_its_pass_timeout_is_a_pause(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """The watchdog cannot tell it from a hang: the process ends, and the next one has the stream."""
    worker = make_worker(FAKE, pass_timeout_s=1.0, restart_wait_ms=1)
    with worker.client() as client:
        client.wait_ready()
        stream = client.generate_tokens(REQUEST.prompt, max_tokens=300, seed=4)
        next(stream)
        stop(worker.engine_pid())
        assert stream.read().tokens == expected_tokens(REQUEST)


def test_a_supervisor_that_is_stopped_supervises_afterwards(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """The worker serves meanwhile; one that dies in that time is started again when the supervisor goes on."""
    worker = make_worker(FAKE, restart_wait_ms=1)
    with worker.client() as client:
        client.wait_ready()
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert client.generate_tokens(
            REQUEST.prompt, max_tokens=300, seed=4
        ).read().tokens == expected_tokens(REQUEST)
        stream = client.generate_tokens(REQUEST.prompt, max_tokens=300, seed=4)
        next(stream)
        worker.kill_engine()
        time.sleep(1.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert stream.read().tokens == expected_tokens(REQUEST)
        # If it was over before the kill, this one finds the next worker.
        assert len(client.generate_tokens([1], max_tokens=3).read().tokens) == 3
        assert client.counters.worker_restarts == 1
    assert worker.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_worker_is_ended_in_time(make_worker: Callable[..., WorkerProcess], number: int) -> None:
    """One that was stopped for good does not outlive its supervisor's order, or its supervisor."""
    worker = make_worker(FAKE, drain_timeout_s=0.5)
    worker.wait_ready()
    engine = worker.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    worker.process.send_signal(number)
    worker.process.wait(60)
    if number == signal.SIGKILL:
        # Its link is gone; it finds out when it goes on.
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: not psutil.pid_exists(engine), "the engine process is left behind")
