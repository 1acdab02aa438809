"""How long a step took, as far as that was the step's own doing."""

from __future__ import annotations

import time


class StepClock:
    """Seconds of a step; where the model is computed by this process, not more than the process has computed.

    Other programs make steps on a CPU longer, and that is no reason to read prompts in chunks that cost more. A device
    of its own works while the process waits (`computes` is false): there the time that has passed is what counts.
    """

    def __init__(self, *, computes: bool) -> None:
        self._computes = computes
        self._started = self._now()

    def start(self) -> None:
        """A step begins."""
        self._started = self._now()

    def seconds(self) -> float:
        """Seconds of the step so far."""
        return min(now - then for now, then in zip(self._now(), self._started, strict=True))

    def _now(self) -> tuple[float, ...]:
        # In some containers to ask for the second takes a tenth of a millisecond.
        return (time.perf_counter(), time.process_time()) if self._computes else (time.perf_counter(),)
