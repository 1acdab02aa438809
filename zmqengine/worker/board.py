"""What the actor and the control thread tell each other. Every field is swapped whole: no locks.

The actor writes the state and a snapshot of its numbers; the control thread reads them. The control thread writes
the wish to drain; the actor reads it.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from zmqengine.protocol.messages import Limits, ModelCard, Progress, TokenizerBundle, WorkerState
from zmqengine.worker.wakeup import Wakeup


@dataclass(slots=True)
class Board:
    """Shared by two threads; each field has one writer."""

    epoch: bytes
    wakeup: Wakeup
    started_s: float = field(default_factory=time.monotonic)
    state: WorkerState = "loading"
    progress: Progress = field(default_factory=lambda: Progress("starting"))
    message: str = ""
    model: ModelCard | None = None
    limits: Limits | None = None
    tokenizer: TokenizerBundle | None = None
    numbers: dict[str, int | float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    pass_times: PassTimes | None = None
    pass_started_s: float = field(default_factory=time.monotonic)
    drain_requests: int = 0
    """How often draining was asked for; the second time ends the worker at once."""

    def ask_to_drain(self) -> None:
        """Called by a signal handler or by the control thread."""
        self.drain_requests += 1
        self.wakeup.ring()


class PassTimes:
    """The last passes that made a step: their whole time and the part outside `next()`, in nanoseconds."""

    SIZE = 1024

    def __init__(self) -> None:
        self._whole = array("q", bytes(8 * self.SIZE))
        self._outside = array("q", bytes(8 * self.SIZE))
        self._count = 0

    def add(self, whole_ns: int, outside_ns: int) -> None:
        """Record one pass."""
        index = self._count % self.SIZE
        self._whole[index] = whole_ns
        self._outside[index] = outside_ns
        self._count += 1

    def numbers(self) -> dict[str, float]:
        """Median, 99th percentile and maximum over the passes kept."""
        kept = min(self._count, self.SIZE)
        if kept == 0:
            return {}
        outside = sorted(self._outside[:kept])
        whole = sorted(self._whole[:kept])
        return {
            "pass_outside_us_p50": outside[kept // 2] / 1000,
            "pass_outside_us_p99": outside[kept * 99 // 100] / 1000,
            "pass_ms_p50": whole[kept // 2] / 1e6,
            "pass_ms_max": whole[-1] / 1e6,
        }
