"""A fake engine that makes vectors alone: `interface.VectorEngine`, with the faults of `FakeEngineConfig`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from zmqengine.engine.fake.fake_engine import FakeCall, FakeEngineConfig
from zmqengine.engine.fake.fake_faults import FakeFaults
from zmqengine.engine.fake.fake_vectors import FakeTexts
from zmqengine.engine.interface import EngineMemory, EngineStats, RowFailure, StepResult, TextsRequest


class FakeVectorEngine:
    """A `VectorEngine` whose vectors follow from the tokens of each text. `calls` holds the last 20,000 calls."""

    def __init__(self, config: FakeEngineConfig) -> None:
        self.config = config
        self.info = config.model_info()
        self.rows_max = config.rows_max
        self.calls: deque[FakeCall] = deque(maxlen=20_000)
        self.rows_elsewhere = 0
        """Last argument of `next`."""
        self.closed = False
        self._faults = FakeFaults(config.faults)
        self.unblock = self._faults.unblock
        self._texts = FakeTexts(config.dimensions, config.labels)
        self._steps = 0

    @property
    def row_ids(self) -> set[int]:
        """The rows it holds, for tests."""
        return set(self._texts.rows)

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        """Add rows; rows over `rows_max` come back as failures."""
        self._record("embed", (request.row for request in requests))
        failures = []
        for request in requests:
            if len(self._texts.rows) >= self.rows_max:
                failures.append(RowFailure(request.row, f"all {self.rows_max} rows are taken"))
            else:
                self._texts.add(request)
        return failures

    def next(self, rows_elsewhere: int = 0) -> StepResult:
        """Make vectors of `prefill_chunk` tokens of text."""
        self._record("next", ())
        self.rows_elsewhere = rows_elsewhere
        step, self._steps = self._steps, self._steps + 1
        result = StepResult()
        try:
            self._faults.strike("next", index=step)
        except Exception:
            self._texts.clear()
            raise
        if self._texts.rows and self.config.step_ms:
            time.sleep(self.config.step_ms / 1000)
        self._texts.step(self.config.prefill_chunk, result)
        return result

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows."""
        rows = tuple(rows)
        self._record("remove", rows)
        for row in rows:
            self._texts.remove(row)

    def stats(self) -> EngineStats:
        """Real counters."""
        self._record("stats", ())
        return EngineStats(len(self._texts.rows), self._steps, self._texts.tokens)

    def memory(self) -> EngineMemory:
        """The parameters' memory, as if there were a model."""
        self._record("memory", ())
        weights = self.config.parameter_bytes
        return EngineMemory(weights=weights, workspace=0, buffers=0, active=weights, peak=weights)

    def close(self) -> None:
        """Drop every row. Idempotent."""
        self._record("close", ())
        self._texts.clear()
        self.closed = True

    def _record(self, method: str, rows: Iterable[int]) -> None:
        self.calls.append(FakeCall.here(method, rows))
