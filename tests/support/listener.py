"""A stream that is read beside other work on a worker, and the silences in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import psutil

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

    The latter is for one token: a reader may get several at once. `system_ms` of it is the system's, as for the pages
    of memory that a virtual machine has given back to its host.
    """

    wall_ms: float
    cpu_ms: float
    system_ms: float

    @property
    def is_long(self) -> bool:
        """Whether it is over the bound; Linux counts in ticks of 10 ms."""
        return round(self.cpu_ms) > SILENT_MS_MAX


class Makers:
    """Threads of a process: by default all that it has now. Those of a worker that has compiled no constraint yet make
    its tokens."""

    def __init__(self, pid: int, ids: Collection[int] = ()) -> None:
        self._process = psutil.Process(pid)
        self._ids = frozenset(ids or (thread.id for thread in self._process.threads()))

    @classmethod
    def event_loop(cls, pid: int) -> Makers:
        """The first thread of a front-end. The others let it have its turn: tokenizers hold no lock of Python's."""
        return cls(pid, (pid,))

    def spent(self) -> dict[int, tuple[float, float]]:
        """Seconds of the processor that each has taken, and those of them that are the system's."""
        threads = [each for each in self._process.threads() if each.id in self._ids]
        return {each.id: (each.user_time + each.system_time, each.system_time) for each in threads}


def native_chunks(client: Client) -> Callable[[], Iterator[Sequence[int]]]:
    """What a listener of a free stream of tokens reads."""

    def chunks() -> Iterator[Sequence[int]]:
        for chunk in client.generate_tokens(PROMPT, max_tokens=400, ignore_eos=True):
            yield chunk.tokens

    return chunks


class Listener:
    """A stream that is read by a thread until `stop`, again and again, with the silences in it.

    `chunks` begins a stream, and yields what comes together; `makers` are the processes on its way.
    """

    def __init__(self, chunks: Callable[[], Iterator[Sequence[Any]]], *makers: Makers) -> None:
        self.silences: list[Silence] = []
        self.held_up = 0
        self.outputs: list[list[Any]] = []
        self._chunks = chunks
        self._makers = makers
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
            output: list[Any] = []
            last: tuple[float, list[dict[int, tuple[float, float]]]] | None = None
            for chunk in self._chunks():
                now = time.monotonic(), [each.spent() for each in self._makers]
                late_s, self._late_s = max(self._late_s, time.monotonic() - self._ticked_s - TICK_S), 0.0
                if late_s > LATE_S_MAX:
                    self.held_up += 1
                elif last is not None and chunk:
                    spent = [_busy_ms(*each) for each in zip(last[1], now[1], strict=True)]
                    cpu_ms, system_ms = (sum(each) / len(chunk) for each in zip(*spent, strict=True))
                    self.silences.append(Silence((now[0] - last[0]) * 1000, cpu_ms, system_ms))
                last = now
                output += chunk
            self.outputs.append(output)

    def _tick(self) -> None:
        while self._thread.is_alive():
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self._late_s = max(self._late_s, now_s - self._ticked_s - TICK_S)
            self._ticked_s = now_s


def longest(silences: Collection[Silence]) -> Silence:
    """Longest silence on the clock, and the longest in processor time and in the system's, which may be others."""
    return Silence(*map(max, zip(*silences, strict=True)))


def _busy_ms(
    before: dict[int, tuple[float, float]], after: dict[int, tuple[float, float]]
) -> tuple[float, float]:
    """Processor time of the two busiest threads, the actor and a device that computes, and the system's part of it."""
    spent = []
    for id_, (whole, system) in after.items():
        whole_before, system_before = before.get(id_, (0.0, 0.0))
        spent.append((whole - whole_before, system - system_before))
    busiest = sorted(spent)[-2:]
    return 1000 * sum(whole for whole, _ in busiest), 1000 * sum(system for _, system in busiest)
