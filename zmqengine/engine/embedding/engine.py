"""The engine of texts: rows of texts beside the rows of another engine, which may generate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.embedding.batches import TextPlace, choose
from zmqengine.engine.host.device_memory import limit_mlx
from zmqengine.engine.interface import (
    Engine,
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowFailure,
    RowPrefill,
    RowRequest,
    RowVectors,
    StepResult,
    TextsRequest,
)

if TYPE_CHECKING:
    from zmqengine.engine.disk_cache import DiskCache

STEP_SHARE = 0.35
"""Time for texts beside rows that generate, as a share of a step's: streams then slow down by no more."""
STEP_S = 0.05
"""Time for texts in a step without such rows. A new row waits for it; what a step costs beside it is far less."""
SHARED_STEP_S = 0.005
"""The same while another process decodes: a part of what its step takes on the fastest devices."""
_KEPT = 0.8


class Job(Protocol):
    """The vectors of one batch of texts, computed in parts."""

    def step(self, tokens_max: int) -> int:
        """Compute the next part, of about `tokens_max` tokens where it can be chosen; returns the tokens of it."""
        ...

    def result(self) -> np.ndarray | None:
        """The vectors (texts, floats) of float32 once the last part is computed."""
        ...


class VectorModel(Protocol):
    """A model that makes vectors."""

    width: int
    tokens_max: int

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that a job needs for a moment."""
        ...

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> Job:
        """A job for these texts; `second` as in `TextsRequest`."""
        ...


class EmbeddingEngine:
    """A `VectorEngine` with the rows of `inner` beside its own; without `inner` there are no others.

    In each `next()` texts get a bounded time, and a batch that takes longer goes on in the next one: an encoder's
    batch after a layer, a decoder's after a chunk of tokens.
    """

    def __init__(
        self,
        model: VectorModel,
        info: ModelInfo,
        inner: Engine | None = None,
        *,
        rows_max: int = 32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._inner = inner
        self._clock = clock
        self._weights = 0 if inner is not None else info.parameter_bytes
        self.info = info
        self.rows_max = rows_max if inner is None else inner.rows_max
        self.step_tokens_max = 1 if inner is None else inner.step_tokens_max
        self._inner_rows: set[int] = set()
        self._step_s = STEP_S
        # Seconds of a step of the other rows, and seconds that a token takes in one part of a job.
        self._inner_s = 0.0
        self._token_s = 0.0
        # Seconds that texts may take beside rows that generate; less than 0 after a part that took more.
        self._credit_s = 0.0
        self._steps = self._texts_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[int, _TextsRow] = {}
        self._chosen: deque[list[TextPlace]] = deque()
        self._job: tuple[Job, list[TextPlace]] | None = None

    # --- rows ---

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        """Add rows of texts."""
        failures = []
        for request in requests:
            if len(self._rows) + len(self._inner_rows) >= self.rows_max:
                failures.append(RowFailure(request.row, f"all {self.rows_max} rows are taken"))
            else:
                self._rows[request.row] = _TextsRow(request)
        return failures

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows that generate."""
        if self._inner is None:
            return [RowFailure(request.row, "the model generates no text") for request in requests]
        failures = self._inner.insert(requests)
        failed = {failure.row for failure in failures}
        self._inner_rows.update(request.row for request in requests if request.row not in failed)
        return failures

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows of either kind."""
        rows = list(rows)
        for row in rows:
            self._rows.pop(row, None)
        self._inner_rows.difference_update(rows)
        if self._inner is not None:
            self._inner.remove(rows)

    def park(self, row: int) -> int:
        """Take a row out. Nothing is kept of texts."""
        if self._rows.pop(row, None) is not None or self._inner is None:
            return 0
        self._inner_rows.discard(row)
        return self._inner.park(row)

    def reset(self) -> None:
        """Drop every row."""
        self._clear()
        self._inner_rows.clear()
        if self._inner is not None:
            self._inner.reset()

    # --- a step ---

    def next(self) -> StepResult:
        """A step of the rows that generate, then texts for a bounded time."""
        result = StepResult()
        limit_s, has_time = self._step_s, True
        if self._inner is not None and self._inner_rows:
            started_s = self._clock()
            result = self._inner.next()
            seconds = self._clock() - started_s
            self._inner_s = seconds if not self._inner_s else _KEPT * self._inner_s + (1 - _KEPT) * seconds
            limit_s = STEP_SHARE * self._inner_s
            # The least part reads every weight, as a step does: it then waits for the steps that pay for it.
            self._credit_s = min(limit_s, self._credit_s + limit_s)
            has_time = self._credit_s >= limit_s
            self._inner_rows.difference_update(
                token.row for token in result.tokens if token.finish is not None
            )
            self._inner_rows.difference_update(failure.row for failure in result.failures)
        if self._rows and has_time:
            began_s = self._clock()
            self._work(limit_s, result)
            self._credit_s -= self._clock() - began_s
            self._steps += 1
        return result

    def _work(self, limit_s: float, result: StepResult) -> None:
        """Parts of jobs, at least one, as long as the next one can be expected to end in time."""
        began_s = before_s = self._clock()
        # A part as long as the limit allows, and no longer than was tried before.
        within = int(limit_s / self._token_s) if self._token_s else self._model.tokens_max // 4
        tokens_max = max(1, min(within, self._model.tokens_max))
        while True:
            job = self._current_job(tokens_max)
            if job is None:
                return
            tokens = job[0].step(tokens_max)
            now_s = self._clock()
            part_s, before_s = now_s - before_s, now_s
            a_token_s = part_s / tokens
            self._token_s = (
                a_token_s if not self._token_s else _KEPT * self._token_s + (1 - _KEPT) * a_token_s
            )
            vectors = job[0].result()
            if vectors is not None:
                self._job = None
                self._settle(job[1], vectors, result)
            if now_s - began_s + self._token_s * self._next_tokens(tokens, tokens_max) > limit_s:
                return

    def _next_tokens(self, last: int, tokens_max: int) -> int:
        """Tokens of the next part: those of the last one of the same job, or of the next batch."""
        if self._job is not None:
            return last
        return sum(place.tokens for place in self._chosen[0]) if self._chosen else tokens_max

    def _current_job(self, tokens_max: int) -> tuple[Job, list[TextPlace]] | None:
        while self._job is None:
            if not self._chosen:
                waiting = [(id_, row.waiting()) for id_, row in self._rows.items() if row.has_waiting]
                self._chosen.extend(choose(waiting, tokens_max))
                for batch in self._chosen:
                    for place in batch:
                        self._rows[place.row].started(place.text)
            if not self._chosen:
                return None
            places = [place for place in self._chosen.popleft() if place.row in self._rows]
            if places:
                requests = [self._rows[place.row].request for place in places]
                texts = [request.texts[place.text] for request, place in zip(requests, places, strict=True)]
                second = [
                    request.second[place.text] if request.second else 0
                    for request, place in zip(requests, places, strict=True)
                ]
                self._job = self._model.begin(texts, second), places
        return self._job

    def _settle(self, places: list[TextPlace], vectors: np.ndarray, result: StepResult) -> None:
        """Hand each vector to its row, and every row's next vectors in order to the result."""
        finite = np.isfinite(vectors).all(axis=1)
        touched: dict[int, _TextsRow] = {}
        for place, vector, is_finite in zip(places, vectors, finite, strict=True):
            row = self._rows.get(place.row)
            if row is None:
                continue
            if not is_finite:
                del self._rows[place.row]
                touched.pop(place.row, None)
                result.failures.append(
                    RowFailure(place.row, f"text {place.text} gave numbers that are not finite")
                )
                continue
            row.made[place.text] = shortened(vector, row.request.dimensions)
            row.done_tokens += place.tokens
            self._texts_tokens += place.tokens
            touched[place.row] = row
        for id_, row in touched.items():
            result.prefills.append(RowPrefill(id_, row.done_tokens, row.tokens, 0))
            ready = row.take()
            if ready:
                is_whole = row.delivered == len(row.request.texts)
                result.vectors.append(RowVectors(id_, np.stack(ready), is_whole))
                if is_whole:
                    del self._rows[id_]

    # --- the rest is the inner engine's ---

    @property
    def disk(self) -> DiskCache | None:
        """The inner engine's."""
        return None if self._inner is None else self._inner.disk

    @property
    def images_bytes_max(self) -> int:
        """Bound of the inner engine."""
        return 0 if self._inner is None else self._inner.images_bytes_max

    @property
    def padding_bytes_max(self) -> int:
        """The inner engine's."""
        return 0 if self._inner is None else self._inner.padding_bytes_max

    def shrink_chunk(self) -> int:
        """Halve the tokens of a batch, and the inner engine's chunk."""
        self._model.tokens_max = max(1, self._model.tokens_max // 2)
        return self._model.tokens_max if self._inner is None else self._inner.shrink_chunk()

    def project_bytes(self, tokens: int) -> int:
        """The inner engine's; texts have no KV cache."""
        return 0 if self._inner is None else self._inner.project_bytes(tokens)

    def limit_prompt_cache(self, bytes_max: int) -> int:
        """The inner engine's."""
        return 0 if self._inner is None else self._inner.limit_prompt_cache(bytes_max)

    def limit_memory(self, bytes_max: int) -> None:
        """Bound MLX's memory to `bytes_max`."""
        if self._inner is None:
            limit_mlx(bytes_max, self.info.parameter_bytes)
        else:
            self._inner.limit_memory(bytes_max)

    def share_device(self, rows_decoding: int) -> None:
        """Keep steps short while rows of other processes decode, which wait for the device too."""
        self._step_s = SHARED_STEP_S if rows_decoding else STEP_S
        if self._inner is not None:
            self._inner.share_device(rows_decoding)

    def keep_warm(self) -> bool:
        """The inner engine's."""
        return False if self._inner is None else self._inner.keep_warm()

    @property
    def empty_bytes(self) -> int:
        """The inner engine's."""
        return 0 if self._inner is None else self._inner.empty_bytes

    def release_buffers(self) -> None:
        """Give back the buffers of arrays that are gone."""
        mx.clear_cache()

    def stats(self) -> EngineStats:
        """The inner engine's, with the rows of texts as rows that prefill."""
        inner = EngineStats(0, 0, 0, 0, 0, 0, 0) if self._inner is None else self._inner.stats()
        return replace(
            inner,
            rows_prefilling=inner.rows_prefilling + len(self._rows),
            steps=inner.steps if self._inner is not None else self._steps,
            prompt_tokens=inner.prompt_tokens + self._texts_tokens,
        )

    def memory(self) -> EngineMemory:
        """The inner engine's, and the workspace of a batch of texts."""
        if self._inner is not None:
            inner = self._inner.memory()
            return replace(inner, workspace=max(inner.workspace, self._model.workspace_bytes))
        return EngineMemory(
            weights=self._weights,
            kv=0,
            padding=0,
            parked=0,
            prompt_cache=0,
            buffers=mx.get_cache_memory(),
            workspace=self._model.workspace_bytes,
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
        )

    def close(self) -> None:
        """Drop every row. Idempotent."""
        self._clear()
        if self._inner is not None:
            self._inner.close()


class _TextsRow:
    """A row of texts: which have been chosen, which have their vector, which were handed over."""

    __slots__ = ("_next", "delivered", "done_tokens", "made", "request", "tokens")

    def __init__(self, request: TextsRequest) -> None:
        self.request = request
        self.tokens = sum(map(len, request.texts))
        self.made: dict[int, np.ndarray] = {}
        self.delivered = self.done_tokens = self._next = 0

    @property
    def has_waiting(self) -> bool:
        return self._next < len(self.request.texts)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """Index and tokens of the texts that were not chosen yet."""
        texts = self.request.texts
        return ((index, len(texts[index])) for index in range(self._next, len(texts)))

    def started(self, index: int) -> None:
        self._next = max(self._next, index + 1)

    def take(self) -> list[np.ndarray]:
        """The next vectors in order, as far as there is no gap."""
        ready = []
        while self.delivered in self.made:
            ready.append(self.made.pop(self.delivered))
            self.delivered += 1
        return ready


def shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first floats of an embedding, of length 1 again."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    return cut / max(float(np.linalg.norm(cut)), 1e-12)
