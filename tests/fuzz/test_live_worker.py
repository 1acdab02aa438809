"""A live worker under attack on its three sockets, while a well-behaved front-end streams from it."""

from __future__ import annotations

import os
import random
import time

import psutil
import pytest

from tests.faults.front_end import FrontEndProcess, Job
from tests.fuzz.attacks import Attacker
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.protocol.addresses import Endpoints

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("ZMQENGINE_FUZZ_SECONDS", "10"))
FAKE = FakeEngineConfig(step_ms=1.0)


@pytest.mark.slow
@pytest.mark.timeout(600 + SECONDS)
def test_hostile_bytes_on_every_socket_disturb_nobody() -> None:
    """$ZMQENGINE_FUZZ_SECONDS of attacks: same process, no traceback, no token lost or changed, nothing left behind."""
    seed = int(os.environ.get("ZMQENGINE_FUZZ_SEED", "0")) or random.randrange(1, 2**32)
    print(f"ZMQENGINE_FUZZ_SEED={seed}")
    with WorkerProcess(
        FAKE, bind="tcp://127.0.0.1:0", supervise=False, grace_ms=200, frame_bytes_max=256 * 1024, queue_max=64,
    ) as worker:  # fmt: skip
        wait_until(lambda: worker.listening_at, "the worker does not listen")
        worker.address = worker.listening_at
        with worker.client(name="watcher") as watcher:
            before = watcher.wait_ready()
            front_end = FrontEndProcess(Job(address=worker.address, streams=4, fake=FAKE.to_json()))
            try:
                front_end.wait_streaming()
                process = psutil.Process(worker.process.pid)
                quiet_fds, quiet_bytes = process.num_fds(), process.memory_info().rss
                attacker = Attacker(Endpoints(worker.address, before.cmd, before.out), random.Random(seed))
                until_s = time.monotonic() + SECONDS
                while time.monotonic() < until_s:
                    attacker.attack()
                    assert worker.process.poll() is None, worker.log[-3000:]
                attacker.close()
                tally = front_end.finish()
            finally:
                front_end.close()
            print(attacker.counts, tally)
            assert tally.errors == []
            assert (tally.missing, tally.repeated, tally.wrong, tally.restarts_seen) == (0, 0, 0, 0)
            wait_until(lambda: watcher.status().numbers["sessions"] <= 1, "sessions of attackers are kept")
            wait_until(lambda: process.num_fds() <= quiet_fds + 4, "file descriptors are kept")
            numbers = watcher.status().numbers
            assert (numbers["running"], numbers["queued"]) == (0, 0)
            assert process.memory_info().rss < quiet_bytes + 200 * 2**20
            assert watcher.describe().epoch == before.epoch
        assert "Traceback" not in worker.log
        assert len(worker.log) < 50_000_000
        assert worker.terminate() == 0
