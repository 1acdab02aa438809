"""A clock for steps of the engine."""

from __future__ import annotations

import time


class StepClock:
    """Seconds of a step; where this process computes the model, not more than the process has computed.

    Other programs make steps on a CPU longer, and that is no reason to prefill in chunks that cost more. A device of
    its own works while the process waits (`computes` is false): there the time that has passed counts.
    """

    def __init__(self, *, computes: bool) -> None:
        self._computes = computes
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._started_s = time.perf_counter()
        # In some containers to read this clock takes a tenth of a millisecond.
        self._computed_s = time.process_time() if self._computes else 0.0

    def seconds(self) -> float:
        """Seconds of the step so far."""
        passed_s = time.perf_counter() - self._started_s
        return min(passed_s, time.process_time() - self._computed_s) if self._computes else passed_s
