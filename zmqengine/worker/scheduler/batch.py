"""The batch: the one owner of what every live request does, and of the step that makes their tokens.

A request is preparing, queued, running (it has a row in the engine) or parked, until it has ended. `lifecycle` takes
requests in and ends them, `rows` gives them rows; here is what becomes of a step. After each the rows of the engine are
those of `rows.running`.
"""

from __future__ import annotations

import logging
import time

from zmqengine.engine.interface import Engine, RowPrefill, StepResult
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.scheduler.lifecycle import Lifecycle
from zmqengine.worker.scheduler.rows import Rows
from zmqengine.worker.telemetry.counters import PassReport
from zmqengine.worker.telemetry.divergences import Divergences
from zmqengine.worker.wire.outgoing import Outgoing

log = logging.getLogger("zmqengine.worker")


class EngineBroken(Exception):
    """The engine failed too often: the process has to end."""


class Batch:
    """Makes steps, and hands on what comes of them.

    A failing engine becomes terminal answers for the guilty and a pause for the others; too many failures raise
    `EngineBroken`.
    """

    def __init__(self, context: WorkerContext, engine: Engine, outgoing: Outgoing) -> None:
        config = context.config
        self._config = config
        self._counters = context.counters
        self._engine = engine
        self._outgoing = outgoing
        self.rows = Rows(context, engine)
        self.lifecycle = Lifecycle(context, self.rows, outgoing, engine.disk)
        self.ledger = self.rows.admission.ledger
        self._divergences = Divergences(context.tokenizer_json if config.log_prompts else None)

    @property
    def has_work(self) -> bool:
        """Whether a pass now would do something for a request."""
        return self.rows.has_work or self.lifecycle.prompt_disk.is_restoring

    def resize(self, limit_bytes: int) -> None:
        """Take another limit of memory; it falls as far as what was promised to requests allows."""
        if limit_bytes != self.ledger.limit_bytes:
            self.rows.admission.resize(limit_bytes, self.lifecycle.live())

    def rest(self) -> None:
        """There has been no work for a while: give back memory that would only make the next request faster."""
        self._engine.release_buffers()

    def step(self, report: PassReport, now_s: float) -> int:
        """Drop rows that ended, admit, make one `next()`, settle; returns the nanoseconds spent in `next()`."""
        try:
            self._prepare_step(report, now_s)
            if not self.rows.running:
                return 0
            started_ns = time.perf_counter_ns()
            result = self._engine.next()
            step_ns = time.perf_counter_ns() - started_ns
            self._counters.latencies.now_s = now_s + step_ns / 1e9
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)
            return 0
        report.stepped = True
        report.tokens = self._settle(result)
        read_tokens_per_s = self.rows.accounts.step(report.tokens, step_ns)
        self.lifecycle.prompt_disk.note_reading(read_tokens_per_s)
        return step_ns

    def _prepare_step(self, report: PassReport, now_s: float) -> None:
        rows, lifecycle = self.rows, self.lifecycle
        lifecycle.take_prepared(now_s)
        for request in rows.full():
            lifecycle.end(request, "length", "")
        rows.grow(now_s)
        rows.drop_leaving()
        for _, failures in rows.admit(now_s):
            report.admitted += 1
            for row, message in failures:
                self._fail_row(row, message)
        self.ledger.settle()

    # --- what became of a step ---

    def _settle(self, result: StepResult) -> int:
        rows, accounts, outgoing = self.rows.running, self.rows.accounts, self._outgoing
        recovery = self.rows.recovery if self.rows.recovery.is_active else None
        stepped: list[LiveRequest] = []
        # Before the tokens: the last one of a row ends its request.
        for draft in result.drafts:
            accounts.draft(rows.get(draft.row), draft)
        for row, token, logprobs, finish in result.tokens:
            request = rows.get(row)
            if request is None:
                continue
            outgoing.token(request, token, logprobs)
            stepped.append(request)
            if recovery is not None:
                recovery.made_token(request)
            if finish is not None:
                self.rows.free(request)
                self.lifecycle.finish(request, finish)
            elif len(request.log.tokens) >= request.grows_at:
                self.rows.note_growth(request)
        self._counters.latencies.stepped(stepped)
        for divergence in result.divergences:
            self._divergences.note(divergence, rows.get(divergence.row))
        for prefill in result.prefills:
            self._note_prefill(prefill)
        for row, message in result.failures:
            self._fail_row(row, message)
        self._counters.tokens += len(result.tokens)
        return len(result.tokens)

    def _note_prefill(self, prefill: RowPrefill) -> None:
        request = self.rows.running.get(prefill.row)
        if request is None:
            return
        self.lifecycle.prompt_disk.forget(request)
        self.rows.accounts.prefill(request, prefill)
        # A prompt that is read in one pass has no progress to tell, only what of it was cached: a client may want to
        # say so with the first token.
        if prefill.done < prefill.total or prefill.cached or request.progress_told:
            request.progress_told = True
            self._outgoing.progress(request, prefill.done, prefill.total, prefill.cached)

    def _fail_row(self, row: int, message: str) -> None:
        request = self.rows.running.get(row)
        if request is not None:
            log.warning(
                "row failed", extra={"request": request.id, "session": request.session_id, "reason": message}
            )
            self.rows.free(request)
            self.lifecycle.finish(request, "error", message)

    def _engine_failed(self, error: Exception, now_s: float) -> None:
        self._counters.engine_failures += 1
        in_engine = list(self.rows.running.values())
        log.error(
            "engine failed",
            extra={
                "requests": [request.id for request in in_engine],
                "cancelled": [request.id for request in self.rows.leaving.values()],
            },
            exc_info=error,
        )
        recovery = self.rows.recovery
        guilty = recovery.failed(in_engine, now_s)
        if recovery.has_failed_too_often:
            config = self._config
            raise EngineBroken(
                f"{config.engine_failures_max + 1} engine failures in "
                f"{config.engine_failures_window_s:g} s, the last one: {error}"
            ) from error
        try:
            self._engine.reset()
        except Exception as second:
            raise EngineBroken(f"the engine could not be reset: {second}") from second
        self.rows.free_all()
        for request in guilty:
            self.lifecycle.finish(request, "error", f"generating this request failed: {error}")
