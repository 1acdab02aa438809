"""Status that the actor and the control thread share without locks.

The actor writes the state and a snapshot of its numbers, each swapped whole, and adds to `pass_times`; the control
thread reads them. The control thread and signal handlers write commands, to drain or to end a request; the actor reads
those.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from zmqengine.protocol.messages import (
    ControlReply,
    Histogram,
    Limits,
    ModelCard,
    Progress,
    RequestInfo,
    SessionInfo,
    TokenizerBundle,
    WorkerState,
)
from zmqengine.worker.process.wakeup import Wakeup


class AdapterCall(NamedTuple):
    """An operator's call to load an adapter from a `directory`, or to unload it (None). `route`: its connection."""

    route: bytes
    call: int
    name: str
    directory: str | None


@dataclass(slots=True)
class SharedStatus:
    """State shared by two threads; each field but `drain_requests` has one writer."""

    epoch: bytes
    wakeup: Wakeup
    started_s: float = field(default_factory=time.monotonic)
    restarts: int = 0
    """Number of restarts by the supervisor."""
    state: WorkerState = "loading"
    progress: Progress = field(default_factory=lambda: Progress("starting"))
    message: str = ""
    model: ModelCard | None = None
    limits: Limits | None = None
    tokenizer: TokenizerBundle | None = None
    numbers: dict[str, int | float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    sessions: list[SessionInfo] = field(default_factory=list)
    requests: list[RequestInfo] = field(default_factory=list)
    pass_times: PassTimes | None = None
    pass_started_s: float = field(default_factory=time.monotonic)
    control_failures: int = 0
    """Number of failures of the control thread, after which it continued."""
    drain_requests: int = 0
    """Number of requests to drain; the second ends the worker at once. Signals add to it, and ctl only if it is 0: at
    worst, two at the same moment count as one."""

    to_end: deque[tuple[str, str]] = field(default_factory=deque)
    """Requests to be ended for an operator: session and request id. The control thread adds, the actor removes."""

    adapter_calls: deque[AdapterCall] = field(default_factory=deque)
    """Calls that the control thread adds and the actor removes."""
    answers: deque[tuple[bytes, ControlReply]] = field(default_factory=deque)
    """Replies to them, which the actor adds and the control thread sends when `answered` has woken it."""
    answered: Callable[[], None] = lambda: None

    @property
    def told_state(self) -> WorkerState:
        """The published state: draining from the reply to a drain command on, before the actor has seen it."""
        return "draining" if self.drain_requests and self.state == "ready" else self.state

    def ask_to_end(self, session: str, request: str) -> None:
        """Called by the control thread."""
        self.to_end.append((session, request))
        self.wakeup.wake()

    def ask_actor(self, call: AdapterCall) -> None:
        """Called by the control thread, whose reply comes by `answer`."""
        self.adapter_calls.append(call)
        self.wakeup.wake()

    def answer(self, route: bytes, reply: ControlReply) -> None:
        """Called by the actor."""
        self.answers.append((route, reply))
        self.answered()

    def ask_to_drain(self) -> None:
        """Called by a signal handler or by the control thread."""
        self.drain_requests += 1
        self.wakeup.wake()


class PassTimes:
    """Total time and phases of the last passes with a step, in nanoseconds.

    `outside` is all but the engine's `next()`: receive + admit_settle + publish.
    """

    SIZE = 1024
    PHASES = ("whole", "outside", "receive", "next", "admit_settle", "publish")

    def __init__(self) -> None:
        self._times = [array("q", bytes(8 * self.SIZE)) for _ in self.PHASES]
        self._count = 0

    def add(self, *nanoseconds: int) -> None:
        """Record one pass: its times in the order of `PHASES`."""
        index = self._count % self.SIZE
        for times, value in zip(self._times, nanoseconds, strict=True):
            times[index] = value
        self._count += 1

    def numbers(self) -> dict[str, float]:
        """Medians in microseconds over the recorded passes; further quantiles of the total and of `outside`."""
        kept = min(self._count, self.SIZE)
        if kept == 0:
            return {}
        times = {name: sorted(times[:kept]) for name, times in zip(self.PHASES, self._times, strict=True)}
        medians = {f"pass_{name}_us_p50": values[kept // 2] / 1000 for name, values in times.items()}
        return medians | {
            "pass_outside_us_p99": times["outside"][kept * 99 // 100] / 1000,
            "pass_ms_p50": times["whole"][kept // 2] / 1e6,
            "pass_ms_max": times["whole"][-1] / 1e6,
        }
