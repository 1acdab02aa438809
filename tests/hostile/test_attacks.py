"""Hostile front-ends beside an honest stream, on a real worker with the bundled model.

The honest tokens do not change, and the worker is the same process afterwards.

ZMQENGINE_HOSTILE_SECONDS sets how long each lasts: by default 20, and half a second for the worst, which are not marked
slow. Times depend on the machine: of the shortest only counts are asserted; of the others also the longest gap in the
honest stream, and the memory a few seconds after.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.hostile.attack import ATTACKS
from tests.support.workers import WorkerProcess, wait_until
from zmqengine_client import Client

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("ZMQENGINE_HOSTILE_SECONDS", "0"))
LONG_S = 20.0
GROWN_MAX = int(os.environ.get("ZMQENGINE_HOSTILE_GROWN_MIB", "64")) * (1 << 20)
GAP_MS_MAX = float(os.environ.get("ZMQENGINE_HOSTILE_GAP_MS", "250"))
FIRST_MS_MAX = float(os.environ.get("ZMQENGINE_HOSTILE_FIRST_MS", "2000"))
SHORT_S = 0.5
HANG_MS = 60_000
MIB = 1 << 20
SETTLE_S = 20.0
"""MLX keeps the buffers of a large batch for some hundred steps more."""
WORST = [
    "subscriptions_many",
    "subscriptions_long",
    "not_subscriptions",
    "resumes_unread",
    "half_open",
    "many_parts",
    "constraints",
]
PROMPT = [5, 9, 2, 31, 7]


@dataclass(frozen=True)
class Outcome:
    """What an attack did to an honest stream and to the worker."""

    tokens: int
    wrong: int
    gap_ms: float
    first_ms: float
    grown_bytes: int
    log_bytes: int


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(None, supervise=False, model="pico") as started:
        started.wait_ready()
        yield started


@pytest.mark.timeout(120 + 3 * max(SECONDS, LONG_S))
@pytest.mark.parametrize(
    "name", [name if name in WORST else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]
)
def test_an_honest_stream_goes_on_beside_a_hostile_front_end(worker: WorkerProcess, name: str) -> None:
    """The right tokens, no long gap, the memory given back, a short log, and the worker serves on."""
    seconds = SECONDS or (SHORT_S if name in WORST else LONG_S)
    outcome = beside(worker, name, seconds)
    print(f"{name}: {outcome}")
    assert outcome.wrong == 0
    assert outcome.tokens > 0
    assert outcome.log_bytes < MIB
    if seconds == SHORT_S:
        assert max(outcome.gap_ms, outcome.first_ms) < HANG_MS
    else:
        assert outcome.gap_ms < GAP_MS_MAX
        assert outcome.first_ms < FIRST_MS_MAX
        assert outcome.grown_bytes < GROWN_MAX


def beside(worker: WorkerProcess, name: str, seconds: float) -> Outcome:
    """Attack, and stream honestly meanwhile; returns when the worker has had time to tidy up."""
    process = psutil.Process(worker.process.pid)
    with worker.client() as client:
        expected = _read(client, [], [])
        _read(client, [], [])
        before_bytes, before_log = process.memory_info().rss, len(worker.log)
        attacker = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.attack", name, worker.address, str(seconds)], cwd=ROOT
        )
        gaps: list[float] = []
        firsts: list[float] = []
        tokens = wrong = 0
        try:
            until_s = time.monotonic() + seconds
            while attacker.poll() is None or time.monotonic() < until_s:
                output = _read(client, gaps, firsts)
                tokens += len(output)
                wrong += output != expected
                assert worker.process.poll() is None, worker.log[-3000:]
            assert attacker.wait(60) == 0, "the attack failed"
        finally:
            attacker.kill()
            attacker.wait()
        newcomer_s = time.monotonic()
        with worker.client() as newcomer:
            assert _read(newcomer, [], []) == expected
        print(f"a newcomer was served after {time.monotonic() - newcomer_s:.1f} s")
        settled = lambda: process.memory_info().rss < before_bytes + GROWN_MAX  # noqa: E731
        deadline_s = time.monotonic() + (SETTLE_S if seconds > SHORT_S else 0)
        while not settled() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        grown = process.memory_info().rss - before_bytes
        wait_until(lambda: client.status().numbers["queued"] == 0, "requests of the attacker are kept")
    assert worker.process.poll() is None, worker.log[-3000:]
    return Outcome(tokens, wrong, max(gaps), max(firsts), grown, len(worker.log) - before_log)


def _read(client: Client, gaps: list[float], firsts: list[float]) -> list[int]:
    """One honest greedy stream; adds the wait for its first token and those between its chunks, in milliseconds."""
    tokens: list[int] = []
    last_s = time.monotonic()
    for chunk in client.generate_tokens(PROMPT, max_tokens=200, ignore_eos=True):
        now_s = time.monotonic()
        (gaps if tokens else firsts).append((now_s - last_s) * 1000)
        last_s = now_s
        tokens += chunk.tokens
    return tokens
