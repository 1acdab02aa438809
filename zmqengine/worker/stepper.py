"""The step: who joins the batch, one `next()`, and what becomes of its tokens."""

from __future__ import annotations

import logging
import time

from zmqengine.config import WorkerConfig
from zmqengine.engine.interface import Engine, StepResult
from zmqengine.worker.counters import Counters, PassReport
from zmqengine.worker.endings import Endings
from zmqengine.worker.recovery import Recovery
from zmqengine.worker.request import LiveRequest
from zmqengine.worker.scheduler import Scheduler

log = logging.getLogger("zmqengine.worker")

MEMORY_CHECK_S = 1.0


class EngineBroken(Exception):
    """The engine failed too often: the process has to end."""


class Stepper:
    """The only caller of the engine's insert, next, remove, reset and trim.

    A failure becomes terminal answers for the guilty and a pause for the others; too many raise `EngineBroken`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        scheduler: Scheduler,
        endings: Endings,
        counters: Counters,
        *,
        memory_limit_bytes: int | None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._scheduler = scheduler
        self._endings = endings
        self._counters = counters
        self._memory_limit_bytes = memory_limit_bytes
        self._memory_check_s = 0.0
        self._recovery = Recovery(
            failures_max=config.engine_failures_max, window_s=config.engine_failures_window_s
        )

    def step(self, report: PassReport, now_s: float) -> int:
        """Drop rows that ended, admit, make one `next()`, settle; returns the nanoseconds spent in `next()`."""
        self._keep_memory(now_s)
        try:
            self._remove_rows()
            report.admitted = self._admit()
            if not self._scheduler.running:
                return 0
            started_ns = time.perf_counter_ns()
            result = self._engine.next()
            step_ns = time.perf_counter_ns() - started_ns
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)
            return 0
        report.stepped = True
        self._counters.latencies.now_s = now_s + step_ns / 1e9
        report.tokens = self._settle(result)
        return step_ns

    def _remove_rows(self) -> None:
        if self._endings.leaving_rows:
            rows, self._endings.leaving_rows = self._endings.leaving_rows, []
            self._engine.remove(rows)

    def _admit(self) -> int:
        if self._recovery.is_active:
            joining = self._recovery.next_to_join()
            for request in joining:
                self._scheduler.renumber(request)
        else:
            joining = []
            while (head := self._scheduler.head()) is not None and self._has_memory_for(head):
                joining.append(self._scheduler.start_head())
        for request in joining:
            self._counters.latencies.admitted(request)
        if joining:
            failures = self._engine.insert([request.row_request(request.row) for request in joining])
            for row, message in failures:
                self._fail_row(row, message)
        return len(joining)

    def _has_memory_for(self, request: LiveRequest) -> bool:
        if not self._scheduler.has_room_for(request):
            return False
        if self._scheduler.has_room_for(request, beside_bytes=self._config.prompt_cache_bytes):
            return True
        room = self._scheduler.kv_bytes_max - self._scheduler.running_bytes - request.projected_bytes
        self._engine.trim_prompt_cache(room)
        return True

    def _settle(self, result: StepResult) -> int:
        running = self._scheduler.running
        stepped: list[LiveRequest] = []
        dirty = self._endings.dirty
        for row, token, logprobs, finish in result.tokens:
            request = running.get(row)
            if request is None:
                continue
            session = request.session
            session.log_bytes += request.log.append(token, logprobs)
            stepped.append(request)
            session.dirty[request] = None
            dirty[session] = None
            if request.strikes:
                self._recovery.made_token(request)
            if finish is not None:
                self._endings.end(request, finish, "", in_engine=False)
        for prefill in result.prefills:
            self._note_prefill(*prefill)
        for row, message in result.failures:
            self._fail_row(row, message)
        self._counters.tokens += len(result.tokens)
        self._counters.latencies.stepped(stepped)
        return len(result.tokens)

    def _note_prefill(self, row: int, done: int, total: int, cached: int) -> None:
        request = self._scheduler.running.get(row)
        if request is None:
            return
        request.cached_tokens = cached
        request.prefilled_tokens = done
        if request.prefill_pass < 0:
            request.prefill_pass = self._counters.passes
            waited = request.prefill_pass - request.arrival_pass + 1
            self._counters.admission_wait_passes_max = max(self._counters.admission_wait_passes_max, waited)
        # A prompt that is read in one pass has no progress to tell.
        if done < total or request.progress_told:
            request.progress_told = True
            request.session.progress[request] = (done, total, cached)
            self._endings.dirty[request.session] = None

    def _fail_row(self, row: int, message: str) -> None:
        request = self._scheduler.running.get(row)
        if request is not None:
            log.warning(
                "row failed", extra={"request": request.id, "session": request.session.id, "reason": message}
            )
            self._endings.end(request, "error", message, in_engine=False)

    def _engine_failed(self, error: Exception, now_s: float) -> None:
        self._counters.engine_failures += 1
        batch = list(self._scheduler.running.values())
        log.error("engine failed", extra={"requests": [request.id for request in batch]}, exc_info=error)
        guilty = self._recovery.failed(batch, now_s)
        if self._recovery.has_failed_too_often:
            raise EngineBroken(
                f"{self._config.engine_failures_max + 1} engine failures in "
                f"{self._config.engine_failures_window_s:g} s, the last one: {error}"
            ) from error
        self._endings.leaving_rows.clear()
        try:
            self._engine.reset()
        except Exception as second:
            raise EngineBroken(f"the engine could not be reset: {second}") from second
        for request in guilty:
            self._endings.end(request, "error", f"generating this request failed: {error}", in_engine=False)

    def _keep_memory(self, now_s: float) -> None:
        """About once a second, give back what can be spared when MLX holds more than its limit."""
        limit = self._memory_limit_bytes
        if limit is None or now_s < self._memory_check_s:
            return
        self._memory_check_s = now_s + MEMORY_CHECK_S
        try:
            memory = self._engine.memory()
            over = memory.active + memory.buffers - limit
            if over > 0:
                kept = memory.prompt_cache + memory.parked
                freed = self._engine.trim_prompt_cache(max(0, kept - over))
                log.info("prompt cache trimmed", extra={"freed_bytes": freed, "over_bytes": over})
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)
