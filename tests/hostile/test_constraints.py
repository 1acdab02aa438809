"""Twenty hostile constraints at a time on a real worker with drafts on, beside a stream of somebody else.

Silence is asserted in processor time of the threads that make tokens, which other programs on the machine do not
change; the time on the clock is printed, and counts on a machine that is at rest.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest

from tests.support.constrained import Pico
from tests.support.hostile_constraints import HOSTILE
from tests.support.workers import WorkerProcess
from zmqengine.errors import BadRequest, ConstraintFailed
from zmqengine.protocol.messages import Constraint
from zmqengine_client import Client

AT_ONCE = 20
TOKENS = 200
PROMPT = [5, 9, 2, 31, 7]
SILENT_MS_MAX = 150.0
GROWN_BYTES_MAX = 64 << 20
JOIN_S = 300.0
IDLE_S = 7.0
"""An idle worker gives memory back after five seconds."""


class Silence(NamedTuple):
    """Time between two chunks of a stream: on the clock, and of the processor in the threads that make tokens.

    The latter is for one token: a reader that the machine holds up reads several at once.
    """

    wall_ms: float
    cpu_ms: float


class Listener:
    """A free stream that is read by a thread until `stop`, again and again, with the silences in it.

    The threads that make tokens are those of now: others compile constraints.
    """

    def __init__(self, worker: WorkerProcess, client: Client) -> None:
        self.silences: list[Silence] = []
        self.outputs: list[list[int]] = []
        self._process = psutil.Process(worker.engine_pid())
        self._making = {thread.id for thread in self._process.threads()}
        self._client = client
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def stop(self) -> None:
        """Read the stream that is running to its end."""
        self._stopping.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the stream hangs"

    @property
    def worst(self) -> Silence:
        """The longest on the clock, and the longest of the processor."""
        return Silence(*(max(values) for values in zip(*self.silences, strict=True)))

    def _listen(self) -> None:
        while not self._stopping.is_set():
            output: list[int] = []
            last: tuple[float, dict[int, float]] | None = None
            for chunk in self._client.generate_tokens(PROMPT, max_tokens=400, ignore_eos=True):
                now = time.monotonic(), self._spent()
                if last is not None and chunk.tokens:
                    spent_ms = _busy_ms(last[1], now[1])
                    self.silences.append(Silence((now[0] - last[0]) * 1000, spent_ms / len(chunk.tokens)))
                last = now
                output += chunk.tokens
            self.outputs.append(output)

    def _spent(self) -> dict[int, float]:
        return {
            thread.id: thread.user_time + thread.system_time
            for thread in self._process.threads()
            if thread.id in self._making
        }


def _busy_ms(before: dict[int, float], after: dict[int, float]) -> float:
    """Processor time of the two busiest threads: the actor, and the device that computes when it does not."""
    spent = sorted(after[id_] - before.get(id_, 0.0) for id_ in after)
    return 1000 * sum(spent[-2:])


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
@pytest.mark.skipif(
    sys.platform != "linux", reason="macOS tells the times of another process's threads to root alone"
)
def test_twenty_hostile_constraints_at_once_silence_nobody(worker: WorkerProcess, pico: Pico) -> None:
    """The corpus three times: every constraint ends, whole where it says so; no restart, no memory that stays."""
    process = psutil.Process(worker.engine_pid())
    with worker.client() as client, worker.client() as other:
        alone = client.generate_tokens(PROMPT, max_tokens=400, ignore_eos=True).read().tokens
        first = run_all(client, pico, 0)
        before_bytes = rss_at_rest(process)
        listener = Listener(worker, other)
        try:
            ends = run_all(client, pico, 1) + run_all(client, pico, 2)
        finally:
            listener.stop()
        grown = rss_at_rest(process) - before_bytes
    worst = Silence(*(max(values) for values in zip(*listener.silences, strict=True)))
    print(
        f"{ends} after {first}; of {len(listener.silences)} silences the worst {worst}; grown {grown >> 20} MiB"
    )
    assert ends.total() == 2 * len(HOSTILE)
    assert ends["stop"] + ends["length"] > 20
    assert all(output == alone for output in listener.outputs)
    assert len(listener.outputs) > 1
    assert worst.cpu_ms < SILENT_MS_MAX
    assert grown < GROWN_BYTES_MAX
    assert worker.engine_pid() == process.pid
