"""A stream that is read beside other work on a worker, and the silences in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import NamedTuple

import psutil

from tests.support.workers import WorkerProcess
from zmqengine_client import Client

SILENT_MS_MAX = 150.0
"""Processor time for which a stream may be silent beside hostile requests."""
PROMPT = [5, 9, 2, 31, 7]
JOIN_S = 300.0
TICK_S = 0.005
LATE_S_MAX = 0.03
"""A reader that the machine held up for longer does not know when a token came: such silences are not counted."""


class Silence(NamedTuple):
    """Time between two chunks of a stream: on the clock, and of the processor in the threads that make tokens.

    The latter is for one token: a reader may get several at once.
    """

    wall_ms: float
    cpu_ms: float


class Listener:
    """A free stream that is read by a thread until `stop`, again and again, with the silences in it.

    `making` are the threads that make tokens: those of a worker that has compiled no constraint yet.
    """

    def __init__(self, worker: WorkerProcess, client: Client, making: Collection[int]) -> None:
        self.silences: list[Silence] = []
        self.held_up = 0
        self.outputs: list[list[int]] = []
        self._process = psutil.Process(worker.engine_pid())
        self._making = frozenset(making)
        self._client = client
        self._stopping = threading.Event()
        self._ticked_s, self._late_s = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        threading.Thread(target=self._tick).start()

    def stop(self) -> None:
        """Read the stream that is running to its end."""
        self._stopping.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the stream hangs"

    def _listen(self) -> None:
        while not self._stopping.is_set():
            output: list[int] = []
            last: tuple[float, dict[int, float]] | None = None
            for chunk in self._client.generate_tokens(PROMPT, max_tokens=400, ignore_eos=True):
                now = time.monotonic(), self._spent()
                late_s, self._late_s = max(self._late_s, time.monotonic() - self._ticked_s - TICK_S), 0.0
                if late_s > LATE_S_MAX:
                    self.held_up += 1
                elif last is not None and chunk.tokens:
                    spent_ms = _busy_ms(last[1], now[1])
                    self.silences.append(Silence((now[0] - last[0]) * 1000, spent_ms / len(chunk.tokens)))
                last = now
                output += chunk.tokens
            self.outputs.append(output)

    def _tick(self) -> None:
        while self._thread.is_alive():
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self._late_s = max(self._late_s, now_s - self._ticked_s - TICK_S)
            self._ticked_s = now_s

    def _spent(self) -> dict[int, float]:
        return {
            thread.id: thread.user_time + thread.system_time
            for thread in self._process.threads()
            if thread.id in self._making
        }


def longest(silences: Collection[Silence]) -> Silence:
    """Longest silence on the clock, and the longest in processor time, which may be another."""
    return Silence(*map(max, zip(*silences, strict=True)))


def threads_of(worker: WorkerProcess) -> set[int]:
    """Ids of the threads that the engine process has now."""
    return {thread.id for thread in psutil.Process(worker.engine_pid()).threads()}


def _busy_ms(before: dict[int, float], after: dict[int, float]) -> float:
    """Processor time of the two busiest threads: the actor, and the device that computes when it does not."""
    spent = sorted(after[id_] - before.get(id_, 0.0) for id_ in after)
    return 1000 * sum(spent[-2:])
