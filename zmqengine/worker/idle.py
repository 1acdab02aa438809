"""Idle time between requests: memory is released, the GPU stays warm for a while, and the machine may sleep.

Before it may, wired memory is let go; the next request wires it again.
"""

from __future__ import annotations

from zmqengine.worker.batch import Batch
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.process.heap import Heap

REST_S = 5.0
"""Idle seconds after which buffers are released; where the GPU is kept warm, the end of that."""
WARM_EVERY_S = 0.5
"""Seconds between warming computations. After about a second without work an Apple GPU lowers its clock, and the next
step takes 56 to 320 ms longer (github.com/ggml-org/llama.cpp/issues/10119, 17766)."""
AWAKE_S = 60.0
"""Idle seconds after which the machine may sleep: pauses of a conversation should not change the assertion each
time."""


class Idle:
    """Follows whether there is work. `keep` is cheap enough for every pass."""

    def __init__(self, context: WorkerContext, batch: Batch, heap: Heap) -> None:
        self._context = context
        self._batch = batch
        self._heap = heap
        self._warm_s = context.config.gpu_warm_s
        self._busy = False
        self._rest_at_s: float | None = None
        self._sleep_at_s: float | None = None
        self._warm_until_s = self._warm_at_s = 0.0

    def keep(self, now_s: float) -> None:
        """Carry out the actions that are due."""
        if self._batch.has_work:
            if not self._busy:
                self._begin()
            return
        if self._busy:
            self._end(now_s)
        if now_s < self._warm_until_s and now_s >= self._warm_at_s:
            self._warm_at_s = now_s + WARM_EVERY_S
            self._batch.keep_warm()
        if self._rest_at_s is not None and now_s >= self._rest_at_s:
            self._rest_at_s = None
            self._batch.release_buffers()
            self._heap.release()
        if self._sleep_at_s is not None and now_s >= self._sleep_at_s:
            self._sleep_at_s = None
            self.unwire()
            self._context.power.release()
            self._tell()

    def unwire(self) -> None:
        """Let wired memory go until the next request: the machine may sleep now, or has slept."""
        if self._context.wired is not None:
            self._context.wired.unwire()

    def next_s(self) -> float | None:
        """Time of the next due action without further work; None if there is none."""
        due = [when for when in (self._rest_at_s, self._sleep_at_s) if when is not None]
        if self._rest_at_s is not None and self._warm_at_s < self._warm_until_s:
            due.append(self._warm_at_s)
        return min(due, default=None)

    def _begin(self) -> None:
        self._busy = True
        self._context.power.hold()
        if self._context.wired is not None:
            self._context.wired.wire()
        self._tell()

    def _end(self, now_s: float) -> None:
        self._busy = False
        self._sleep_at_s = now_s + AWAKE_S
        is_warmed = self._warm_s > 0 and self._batch.keep_warm()
        self._warm_until_s = now_s + self._warm_s if is_warmed else 0.0
        self._warm_at_s = now_s + WARM_EVERY_S
        # Releasing buffers would force the next request to allocate them again.
        self._rest_at_s = max(now_s + REST_S, self._warm_until_s)

    def _tell(self) -> None:
        shared_status = self._context.shared_status
        shared_status.facts = {**shared_status.facts, "power_assertion": self._context.power.description}
