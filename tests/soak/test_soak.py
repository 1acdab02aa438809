"""Everything at once, for as long as one likes: $ZMQENGINE_SOAK_SECONDS, twenty if it is not set."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import psutil
import pytest

from tests.soak.visitor import POISON, Visitor
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("ZMQENGINE_SOAK_SECONDS", "20"))
VISITORS = 10
ENDS = {"stop", "length", "abort", "left", "poisoned"}
"""Some request ends in each way, however few there are in the time."""
FAKE = FakeEngineConfig(
    step_ms=0.5,
    rows_max=24,
    faults=(FakeFault(place="token", action="fail", token=POISON, index=5, times=None),),
)


def kill(worker: WorkerProcess) -> None:
    """The engine process is gone."""
    worker.kill_engine()


def pause(worker: WorkerProcess) -> None:
    """The engine process stands still for a moment, as under memory pressure."""
    process = psutil.Process(worker.engine_pid())
    process.suspend()
    time.sleep(0.7)
    process.resume()


class Memory:
    """Resident bytes and file descriptors of the engine process over time."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._started_s = time.monotonic()
        self.samples: list[tuple[float, int, int]] = []

    def sample(self) -> None:
        """Look once."""
        age_s = time.monotonic() - self._started_s
        self.samples.append((age_s, self._process.memory_info().rss, self._process.num_fds()))

    def slope_bytes_per_s(self) -> float:
        """Of the resident bytes, least squares, the first quarter left out as warming up."""
        settled = self.samples[len(self.samples) // 4 :]
        mean_s = sum(when for when, _, _ in settled) / len(settled)
        mean_bytes = sum(rss for _, rss, _ in settled) / len(settled)
        above = sum((when - mean_s) * (rss - mean_bytes) for when, rss, _ in settled)
        return above / sum((when - mean_s) ** 2 for when, _, _ in settled)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 200)
def test_a_crowd_of_random_front_ends_and_faults_leaves_nothing_behind() -> None:
    """One terminal answer each, no gap, right tokens; then an empty engine, freed logs, flat memory and fds."""
    seed = int(os.environ.get("ZMQENGINE_SOAK_SEED", "0")) or random.randrange(1, 2**32)
    print(f"ZMQENGINE_SOAK_SEED={seed}")
    chance = random.Random(seed)
    faults: Counter[str] = Counter()
    with WorkerProcess(
        FAKE, restarts_max=10**6, restart_wait_ms=1, restart_wait_max_ms=1, fault_drop_frames=0.02, grace_ms=500,
        queue_max=40, pass_timeout_s=10.0, log_level="warning",
    ) as worker:  # fmt: skip
        worker.wait_ready()
        visitors = [Visitor(worker.client, FAKE, seed + number) for number in range(VISITORS)]
        try:
            disturbed_until_s = time.monotonic() + SECONDS / 2
            while time.monotonic() < disturbed_until_s:
                time.sleep(chance.uniform(0.2, 3.0))
                fault = chance.choice([kill, kill, pause])
                fault(worker)
                faults[fault.__name__] += 1
            with worker.client(name="watcher") as watcher:
                watcher.wait_ready()
                memory = Memory(worker.engine_pid())
                quiet_until_s = time.monotonic() + SECONDS / 2
                while (
                    time.monotonic() < quiet_until_s
                    or not set().union(*(visitor.outcomes.copy() for visitor in visitors)) >= ENDS
                ):
                    memory.sample()
                    time.sleep(SECONDS / 200)
                for visitor in visitors:
                    visitor.stop()
                for visitor in visitors:
                    visitor.join(60)
                outcomes = sum((visitor.outcomes for visitor in visitors), Counter[str]())
                slope = memory.slope_bytes_per_s()
                print(f"requests {outcomes.total()} {dict(outcomes)}, faults {dict(faults)}, resumed "
                      f"{sum(visitor.resumed for visitor in visitors)}, slope {slope / 1024:.1f} KiB/s")  # fmt: skip
                assert [fault for visitor in visitors for fault in visitor.faults] == []
                wait_until(lambda: watcher.status().numbers["sessions"] == 0, "sessions are kept")
                numbers = watcher.status().numbers
                for name in ("running", "queued", "requests_held", "log_bytes", "rows_decoding", "kv_bytes"):
                    assert numbers[name] == 0, name
                # The allocator's own ups and downs are more than that in a short run.
                assert slope * SECONDS < max(12 * 2**20, SECONDS * 2**12)
                fds_max = max(fds for _, _, fds in memory.samples[: len(memory.samples) // 2])
                wait_until(
                    lambda: memory.sample() or memory.samples[-1][2] <= fds_max, "descriptors are kept"
                )
        finally:
            for visitor in visitors:
                visitor.stop()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
