"""One engine step: schedule the rows, call `engine.next()`, and route its results to their requests."""

from __future__ import annotations

import logging
import time

from zmqengine.engine.host.device_errors import ONCE_S, DeviceError, device_error
from zmqengine.engine.interface import (
    Engine,
    RowDraft,
    RowFailure,
    RowPrefill,
    RowVectors,
    StepResult,
    VectorEngine,
)
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.telemetry.counters import PassReport
from zmqengine.worker.telemetry.divergences import Divergences
from zmqengine.worker.wire.outgoing import Outgoing

log = logging.getLogger("zmqengine.worker")


class EngineBroken(Exception):
    """The engine failed too often, or could not be reset: the process has to end."""


class Batch:
    """Runs the engine's steps for the rows that the scheduler chose.

    A failed step ends the guilty requests with `error`, and the others run again. A failure of the device has no guilty
    request: `device_errors` has the remedy. Too many failures raise `EngineBroken`.
    """

    def __init__(
        self,
        context: WorkerContext,
        engine: Engine | VectorEngine,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        outgoing: Outgoing,
    ) -> None:
        config = context.config
        self._config = config
        self._counters = context.counters
        self._engine = engine
        self._generator = engine if isinstance(engine, Engine) else None
        self._embedder = None if isinstance(engine, Engine) else engine
        self._rows_elsewhere = 0
        self._chunk_tokens: int | None = None
        self._timeout_s: float | None = None
        self._clock = context.clock
        self._release_buffers = context.release_buffers
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._outgoing = outgoing
        self._divergences = Divergences(context.tokenizer_json if config.log_prompts else None)

    @property
    def has_work(self) -> bool:
        """Whether a pass now would advance a request."""
        return self._scheduler.has_work or self._lifecycle.prompt_disk.is_restoring

    @property
    def rows_decoding(self) -> int:
        return self._engine.stats().rows_decoding

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model and its adapters."""
        return self._engine.info.parameter_bytes

    def share_device(self, rows_decoding: int) -> None:
        """Shorten steps for rows that decode in other workers."""
        self._rows_elsewhere = rows_decoding
        if self._generator is not None:
            self._generator.share_device(rows_decoding)

    def keep_warm(self) -> bool:
        """Keep an idle device's clock up; False if the device does not need it, or other workers use it."""
        if self._rows_elsewhere:
            return False
        try:
            return self._generator is not None and self._generator.keep_warm()
        except Exception as error:
            fault = device_error(error)
            if fault is None:
                raise
            if self._is_lost(fault, self._clock()):
                raise _lost(fault, error) from error
            log.warning("the device was not kept warm", extra={"device": fault.name})
            return True

    def release_buffers(self) -> None:
        """Release memory that only speeds up the next request."""
        self._release_buffers()

    def step(self, report: PassReport, now_s: float) -> int:
        """Schedule, make one `next()`, and settle its results; returns the nanoseconds spent in `next()`."""
        try:
            self._schedule(report, now_s)
            if not self._scheduler.running:
                return 0
            started_ns = time.perf_counter_ns()
            result = self._next()
            step_ns = time.perf_counter_ns() - started_ns
            self._counters.latencies.now_s = now_s + step_ns / 1e9
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)
            return 0
        report.stepped = True
        report.tokens = len(result.tokens) - result.forced
        self._settle(result)
        # A row decodes one token, and its accepted draft tokens.
        rows = max(1, report.tokens - sum(draft.accepted for draft in result.drafts))
        prefill_tokens_per_s = self._scheduler.note_step(report.tokens, rows, step_ns / 1e9 - result.aside_s)
        self._lifecycle.prompt_disk.note_prefill(prefill_tokens_per_s)
        return step_ns

    def _next(self) -> StepResult:
        return self._engine.next() if self._embedder is None else self._embedder.next(self._rows_elsewhere)

    def _schedule(self, report: PassReport, now_s: float) -> None:
        self._lifecycle.take_prepared(now_s)
        for request in self._scheduler.rows_at_limit():
            self._lifecycle.end(request, "length")
        for _, failures in self._scheduler.schedule(now_s):
            report.admitted += 1
            for failure in failures:
                self._fail_row(failure)

    # --- results of a step ---

    def _settle(self, result: StepResult) -> None:
        scheduler, running = self._scheduler, self._scheduler.running
        recovery = scheduler.recovery if scheduler.recovery.is_active else None
        # Drafts before tokens: a row's last token ends its request.
        for draft in result.drafts:
            self._note_draft(draft)
        stepped: list[LiveRequest] = []
        for row, token, logprobs, finish in result.tokens:
            request = running.get(row)
            if request is None:
                continue
            self._outgoing.token(request, token, logprobs)
            stepped.append(request)
            if recovery is not None:
                recovery.made_token(request)
            if finish is not None:
                scheduler.free(request)
                self._lifecycle.end(request, finish)
            elif len(request.log) >= request.grows_at:
                scheduler.needs_growth(request)
        self._counters.latencies.stepped(stepped)
        for vectors in result.vectors:
            self._note_vectors(vectors)
        for divergence in result.divergences:
            self._divergences.note(divergence, running.get(divergence.row))
        for prefill in result.prefills:
            self._note_prefill(prefill)
        for failure in result.failures:
            self._fail_row(failure)
        self._counters.tokens += len(result.tokens) - result.forced

    def _note_draft(self, draft: RowDraft) -> None:
        row, source, proposed, accepted = draft
        self._counters.count_draft(source, proposed, accepted)
        request = self._scheduler.running.get(row)
        if request is not None:
            before = request.drafts.get(source, (0, 0))
            request.drafts[source] = (before[0] + proposed, before[1] + accepted)

    def _note_vectors(self, result: RowVectors) -> None:
        request = self._scheduler.running.get(result.row)
        if request is None:
            return
        self._outgoing.vectors(request, result.vectors)
        self._counters.vectors += len(result.vectors)
        if request.first_token_s is None:
            request.first_token_s = self._counters.latencies.now_s
        self._scheduler.recovery.made_token(request)
        if result.is_whole:
            self._scheduler.free(request)
            self._lifecycle.end(request, "stop")

    def _note_prefill(self, prefill: RowPrefill) -> None:
        request = self._scheduler.running.get(prefill.row)
        if request is None:
            return
        self._lifecycle.prompt_disk.release(request)
        self._scheduler.note_prefill(request, prefill)
        # A prompt that is prefilled in one pass has no progress to report except its cached part, which goes with the
        # first token.
        if request.embeds:
            return
        if prefill.done < prefill.total or prefill.cached or request.progress_told:
            request.progress_told = True
            self._outgoing.progress(request, prefill.done, prefill.total, prefill.cached)

    def _fail_row(self, failure: RowFailure) -> None:
        row, message, code = failure
        request = self._scheduler.running.get(row)
        if request is not None:
            log.warning(
                "row failed", extra={"request": request.id, "session": request.session_id, "reason": message}
            )
            self._scheduler.free(request)
            self._lifecycle.end(request, "error", message, code)

    def _engine_failed(self, error: Exception, now_s: float) -> None:
        self._counters.engine_failures += 1
        scheduler = self._scheduler
        in_engine = list(scheduler.running.values())
        fault = device_error(error)
        log.error(
            "engine failed",
            extra={
                "requests": [request.id for request in in_engine],
                "cancelled": [request.id for request in scheduler.leaving.values()],
                "device": None if fault is None else fault.name,
            },
            exc_info=error,
        )
        if fault is not None:
            if self._is_lost(fault, now_s):
                raise _lost(fault, error) from error
            if not in_engine:
                # Nothing was computed for anybody.
                return
            is_smaller = self._shrink()
            if fault.remedy == "shrink" and not is_smaller:
                fault = None
        if fault is None:
            guilty = scheduler.recovery.failed(in_engine, now_s)
        else:
            guilty = []
            scheduler.recovery.device_failed(in_engine, now_s)
        if scheduler.recovery.has_failed_too_often:
            config = self._config
            raise EngineBroken(
                f"{config.engine_failures_max + 1} engine failures in "
                f"{config.engine_failures_window_s:g} s, the last one: {error}"
            ) from error
        self._reset(keep_prompts=fault is not None and fault.keeps_prompts)
        scheduler.free_all()
        for request in guilty:
            self._lifecycle.end(request, "error", f"generating this request failed: {error}")

    def _is_lost(self, fault: DeviceError, now_s: float) -> bool:
        """Whether the process has to end for a failure of the device."""
        if fault.remedy != "once":
            return fault.remedy == "exit"
        before_s, self._timeout_s = self._timeout_s, now_s
        return before_s is not None and now_s - before_s < ONCE_S

    def _shrink(self) -> bool:
        """Have smaller prefill chunks; False if they are as small as they get."""
        if self._generator is None:
            # It shrinks its batches by itself.
            return False
        before, self._chunk_tokens = self._chunk_tokens, self._generator.shrink_chunk()
        log.warning("smaller prefill chunks", extra={"tokens_max": self._chunk_tokens})
        return before != self._chunk_tokens

    def _reset(self, *, keep_prompts: bool) -> None:
        if self._generator is None:
            # Every row has left it.
            return
        try:
            self._generator.reset(keep_prompts=keep_prompts)
        except Exception as second:
            raise EngineBroken(f"the engine could not be reset: {second}") from second


def _lost(fault: DeviceError, error: Exception) -> EngineBroken:
    return EngineBroken(f"the device failed ({fault.name}): {error}")
