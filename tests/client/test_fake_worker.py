"""The worker for authors of front-ends."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client


@pytest.mark.parametrize("process", [False, True])
def test_it_serves_what_it_says_and_leaves_nothing_behind(process: bool) -> None:
    """The example of the module: expected tokens, and no files or processes afterwards."""
    with FakeWorker(process=process) as worker, Client(worker.address) as client:
        directory = Path(worker.address.removeprefix("ipc://")).parents[1]
        assert directory.exists()
        pid = worker.pid
        result = client.generate_tokens([1, 2], max_tokens=3, seed=0).read()
        assert result.tokens == worker.expected_tokens([1, 2], 3)
    assert not directory.exists()
    assert psutil.pid_exists(pid) != process


def test_an_end_token_is_expected_too() -> None:
    """`expected_tokens` knows the engine's configuration and the options that end an output."""
    with FakeWorker(FakeEngineConfig(eos_index=4)) as worker, Client(worker.address) as client:
        ended = client.generate_tokens([1], max_tokens=9, seed=0).read()
        assert ended.tokens == worker.expected_tokens([1], 9)
        assert (ended.finish, len(ended.tokens)) == ("stop", 5)
        whole = client.generate_tokens([1], max_tokens=9, seed=0, ignore_eos=True).read()
        assert whole.tokens == worker.expected_tokens([1], 9, ignore_eos=True)
        assert len(whole.tokens) == 9


def test_a_worker_in_a_thread_leaves_the_timer_of_its_process_alone() -> None:
    """Time-outs of test runners use it: a worker that took it would leave them without."""
    handler = signal.getsignal(signal.SIGALRM)
    before, _ = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with FakeWorker() as worker, Client(worker.address) as client:
            client.generate_tokens([1, 2], max_tokens=3, seed=0).read()
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left < 1000
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)


def test_a_worker_in_a_thread_cannot_be_killed_or_frozen() -> None:
    """That would be the test itself."""
    with FakeWorker() as worker:
        with pytest.raises(RuntimeError, match="process=True"):
            worker.kill()
        with pytest.raises(RuntimeError, match="process=True"):
            worker.freeze()


def test_several_run_at_once() -> None:
    """Each at an address of its own."""
    with (
        FakeWorker() as one,
        FakeWorker() as two,
        Client(one.address) as first,
        Client(two.address) as second,
    ):
        assert first.describe().epoch != second.describe().epoch


def test_a_worker_that_cannot_start_is_told_at_once() -> None:
    """Not a time-out: what it wrote on standard error says why."""
    with pytest.raises(RuntimeError, match="did not start"):
        FakeWorker(
            process=True, bind="tcp://127.0.0.1:0", server_key="/nowhere", authorized_keys="/nowhere"
        ).start()
