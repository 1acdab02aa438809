"""Twenty hostile constraints at a time on a real worker with drafts on, beside a stream of somebody else.

Silence is asserted in processor time of the threads that make tokens, which other programs on the machine do not
change; the time on the clock is printed, and counts on a machine that is at rest.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from tests.support.constrained import Pico
from tests.support.hostile_constraints import HOSTILE
from tests.support.listener import (
    PROMPT,
    SILENT_MS_MAX,
    Listener,
    Makers,
    Silence,
    longest,
    native_chunks,
)
from tests.support.workers import WorkerProcess
from zmqengine.errors import BadRequest, ConstraintFailed
from zmqengine.protocol.messages import Constraint
from zmqengine_client import Client

pytestmark = pytest.mark.process

AT_ONCE = 20
ROUNDS = int(os.environ.get("ZMQENGINE_HOSTILE_ROUNDS", "2"))
"""Times that the corpus runs after its first."""
TOKENS = 200
GROWN_BYTES_MAX = 64 << 20
IDLE_S = 7.0
"""An idle worker gives memory back after five seconds."""


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(None, model="pico", speculate="auto", prompt_cache_bytes=0) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


def run_all(client: Client, pico: Pico, seed: int) -> Counter[str]:
    """All of the corpus, twenty at once; returns how they ended. Outputs that say `stop` are whole."""
    ends: Counter[str] = Counter()
    prompt = pico.text.encode("Tell me about Tom.").ids
    for names in itertools.zip_longest(*[iter(HOSTILE)] * AT_ONCE):
        streams = {
            name: client.generate_tokens(
                prompt,
                constraint=Constraint(HOSTILE[name][0], HOSTILE[name][1], HOSTILE[name][2]),
                max_tokens=TOKENS, temperature=1.0, seed=seed,
            )
            for name in names
            if name is not None
        }  # fmt: skip
        for name, stream in streams.items():
            try:
                done = stream.read()
            except (BadRequest, ConstraintFailed) as error:
                ends[error.code] += 1
                continue
            ends[str(done.finish)] += 1
            if done.finish == "stop":
                assert pico.grammar(*HOSTILE[name]).start(done.tokens).is_complete, name
    return ends


def rss_at_rest(process: psutil.Process) -> int:
    """Resident bytes, once an idle worker has given back what it can."""
    threading.Event().wait(IDLE_S)
    return int(process.memory_info().rss)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    sys.platform != "linux", reason="macOS tells the times of another process's threads to root alone"
)
def test_twenty_hostile_constraints_at_once_silence_nobody(worker: WorkerProcess, pico: Pico) -> None:
    """The corpus several times: every constraint ends, whole where it says so; no restart, no memory that stays."""
    process = psutil.Process(worker.engine_pid())
    ends: list[Counter[str]] = []
    worst: list[Silence] = []
    rested: list[int] = []
    with worker.client() as client, worker.client() as other:
        alone = client.generate_tokens(PROMPT, max_tokens=400, ignore_eos=True).read().tokens
        makers = Makers(process.pid)
        for seed in range(ROUNDS + 1):
            listener = Listener(native_chunks(other), makers)
            try:
                ends.append(run_all(client, pico, seed))
            finally:
                listener.stop()
            worst.append(longest(listener.silences))
            rested.append(rss_at_rest(process))
            print(
                f"{dict(ends[-1])}, {rested[-1] >> 20} MiB at rest; of {len(listener.silences)} silences the longest "
                f"{worst[-1]}, {listener.held_up} not measured"
            )
            assert all(output == alone for output in listener.outputs)
            assert len(listener.silences) > listener.held_up / 10
    for each in ends:
        assert each.total() == len(HOSTILE)
        assert each["stop"] + each["length"] > 10
    # A constraint that silences others does so in every round; page faults and stolen time, in one.
    assert min(silence.cpu_ms for silence in worst) < SILENT_MS_MAX
    assert rested[-1] - rested[0] < GROWN_BYTES_MAX
    assert worker.engine_pid() == process.pid
