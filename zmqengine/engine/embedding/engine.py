"""The engine of encoders: rows of texts alone, a bounded batch or a part of one a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.host.device_errors import device_error
from zmqengine.engine.interface import (
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowFailure,
    StepResult,
    TextsRequest,
)
from zmqengine.engine.step.pacing import StepPace
from zmqengine.engine.step.step_clock import StepClock
from zmqengine.engine.texts.text_rows import TextPlace, TextRows

log = logging.getLogger("zmqengine.engine")

SHARED_STEP_S = 0.005
"""Target of the time of a step while another process decodes: a part of what its step takes on the fastest devices."""


class Job(Protocol):
    """The vectors of one batch of texts, computed in parts."""

    @property
    def is_launched(self) -> bool:
        """Whether no part is left to launch."""
        ...

    def step(self, tokens_max: int) -> int:
        """Compute the next part, of about the time of `tokens_max` tokens; returns the tokens that take as long.

        The last part is launched only.
        """
        ...

    def result(self) -> np.ndarray:
        """Wait for the vectors (texts, floats) of float32. To be called after the last part."""
        ...


class VectorModel(Protocol):
    """A model that makes vectors."""

    width: int
    tokens_max: int

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that a job needs for a moment."""
        ...

    def padded_max(self, tokens_max: int) -> int:
        """The most tokens, once all texts are padded to one length, of a batch that has `tokens_max` without."""
        ...

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> Job:
        """A job for these texts; `second` as in `TextsRequest`."""
        ...


class EmbeddingEngine:
    """A `VectorEngine` on a model of MLX.

    A step computes one batch, whose size follows the measured speed as that of prefill chunks does. A text that takes
    longer by itself goes on in the next step: after a layer, or several. `step_s`: target of the time of a step, for
    which a new row waits; 0 for no limit. On a GPU (`is_gpu`) the next step launches its batch before it
    reads these vectors: the device computes while the host publishes, receives and builds.
    """

    def __init__(
        self,
        model: VectorModel,
        info: ModelInfo,
        *,
        rows_max: int = 32,
        step_s: float = 0.2,
        clock: StepClock | None = None,
        is_gpu: bool = False,
    ) -> None:
        self._model = model
        self.info = info
        self.rows_max = rows_max
        self._clock = StepClock(computes=not is_gpu) if clock is None else clock
        self._step_s = step_s
        self._pace = StepPace(model.tokens_max, model.tokens_max, step_s, gpu=is_gpu)
        self._texts = TextRows()
        self._job: _Batch | None = None
        self._launched: _Batch | None = None
        self._is_gpu = is_gpu
        self._steps = self._texts_tokens = 0

    # --- rows ---

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        failures = []
        for request in requests:
            if len(self._texts.rows) >= self.rows_max:
                failures.append(RowFailure(request.row, f"all {self.rows_max} rows are taken"))
            else:
                self._texts.add(request)
        return failures

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows. Their texts in a batch under way are computed and dropped."""
        for row in rows:
            self._texts.rows.pop(row, None)

    # --- a step ---

    def next(self, rows_elsewhere: int = 0) -> StepResult:
        """Compute a batch of texts, or the next part of one that takes longer."""
        self._pace.target_s = min(self._step_s, SHARED_STEP_S) if rows_elsewhere else self._step_s
        try:
            return self._step()
        except Exception as error:
            self.close()
            if device_error(error) is not None:
                self._shrink()
            raise

    def _shrink(self) -> None:
        mx.clear_cache()
        before, self._model.tokens_max = self._model.tokens_max, self._pace.shrink()
        if self._model.tokens_max == before:
            # On a GPU the pace gives up chunks for bursts first, which texts have none of.
            self._model.tokens_max = self._pace.shrink()
        log.warning("smaller batches of texts", extra={"tokens_max": self._model.tokens_max})

    def _step(self) -> StepResult:
        result = StepResult()
        tokens_max, tokens = self._pace.choose(decoding=0, waiting=0), 0
        before, self._launched = self._launched, None
        self._clock.start()
        if self._job is None:
            self._job = self._begin(tokens_max)
        if self._job is not None:
            tokens = self._job.job.step(tokens_max)
            if self._job.job.is_launched:
                self._launched, self._job = self._job, None
        if not self._is_gpu:
            before, self._launched = self._launched, None
        vectors = None if before is None else before.job.result()
        if tokens or vectors is not None:
            self._pace.record(tokens, self._clock.seconds())
            self._steps += 1
        if before is not None and vectors is not None:
            self._texts.settle(before.places, vectors, result)
            self._texts_tokens += sum(place.tokens for place in before.places)
        return result

    def _begin(self, tokens_max: int) -> _Batch | None:
        places = self._texts.take(tokens_max, self._model.padded_max(tokens_max))
        if not places:
            return None
        seconds = [self._texts.rows[place.row].request.second for place in places]
        second = [of_row[place.text] if of_row else 0 for of_row, place in zip(seconds, places, strict=True)]
        return _Batch(self._model.begin([self._texts.text(place) for place in places], second), places)

    def stats(self) -> EngineStats:
        """Rows of texts count as rows that prefill."""
        return EngineStats(len(self._texts.rows), self._steps, self._texts_tokens)

    def memory(self) -> EngineMemory:
        """Weights and the workspace of a batch."""
        return EngineMemory(
            weights=self.info.parameter_bytes,
            workspace=self._model.workspace_bytes,
            buffers=mx.get_cache_memory(),
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
        )

    def close(self) -> None:
        """Drop every row. Idempotent."""
        self._texts = TextRows()
        self._job = self._launched = None


class _Batch(NamedTuple):
    job: Job
    places: list[TextPlace]
