"""Context of a worker's parts: constant facts, and the counters that all of them add to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zmqengine.config import WorkerConfig
from zmqengine.engine.interface import ModelInfo
from zmqengine.protocol.messages import Limits
from zmqengine.worker.process.memory_pressure import Source
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine.worker.process.power import PowerAssertion, Wired
from zmqengine.worker.telemetry.counters import Counters
from zmqengine.worker.telemetry.shared_status import SharedStatus

if TYPE_CHECKING:
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """`memory_limit_bytes` is the engine's first memory limit; `memory_share` adjusts it to the other workers.

    `clock`: seconds, monotonic.
    """

    config: WorkerConfig
    shared_status: SharedStatus
    limits: Limits
    model: ModelInfo
    memory_limit_bytes: int
    compiler: ConstraintCompiler | None = None
    """Compiler of constraints for this model; None where the engine supports none."""
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    memory_share: MemoryShare | None = None
    power: PowerAssertion = field(default_factory=lambda: PowerAssertion(None))
    asleep_s: Callable[[], float] = lambda: 0.0
    """Seconds that the machine has slept in all."""
    is_authorized: Callable[[str], bool] = lambda user: True
    """Whether a session's key is still known; asked on the actor's thread."""
    memory_pressure: Source = lambda: "normal"
    """Pressure on the memory that the engine's device shares with the system."""
    release_buffers: Callable[[], None] = lambda: None
    """Release the platform's memory for reuse. The next step is a little slower; nothing is lost."""
    wired: Wired | None = None
    """Memory that is never paged out; None where there is none."""
    report_adapters: Callable[[list[str]], None] = lambda adapters: None
    """Tell the supervisor the adapters, each as NAME=DIR, that the next process needs."""
    tokenizer_json: bytes | None = None
    """Decoder of tokens to text, for the log."""

    @property
    def epoch(self) -> bytes:
        """Identifier of this life of the worker."""
        return self.shared_status.epoch
