"""The batch: the one owner of what every live request does, and the only user of the engine.

A request is preparing, queued, running (it has a row in the engine) or parked, until it has ended. After every step
the rows of the engine are those of `Batch.rows`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from itertools import count

from zmqengine.engine.interface import Engine, RowPrefill, StepResult
from zmqengine.errors import Draining, ZmqEngineError
from zmqengine.protocol.messages import End, Finish, Insert
from zmqengine.worker.accounts import Accounts
from zmqengine.worker.admission import Admission
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.counters import PassReport
from zmqengine.worker.deadlines import Deadlines
from zmqengine.worker.divergences import Divergences
from zmqengine.worker.outgoing import Outgoing
from zmqengine.worker.preparing import Preparation, Preparer, both, preparation_of
from zmqengine.worker.prompt_disk import PromptDisk
from zmqengine.worker.recovery import Recovery
from zmqengine.worker.request import LiveRequest
from zmqengine.worker.session import Session
from zmqengine.worker.ticket import Ticket

log = logging.getLogger("zmqengine.worker")


class EngineBroken(Exception):
    """The engine failed too often: the process has to end."""


class Batch:
    """Takes requests in, gives each exactly one terminal answer, and makes the steps in between.

    A failing engine becomes terminal answers for the guilty and a pause for the others; too many failures raise
    `EngineBroken`. Memory is promised by need: a row has room for what it holds and for a little growth, and when
    there is none left the row that comes last in the order of service is parked until there is.
    """

    def __init__(self, context: WorkerContext, engine: Engine, outgoing: Outgoing) -> None:
        config = context.config
        self._context = context
        self._counters = context.counters
        self._engine = engine
        self._outgoing = outgoing
        self._admission = Admission(context, engine)
        self._order = self._admission.order
        self._accounts = Accounts(context.counters, self._admission)
        self.ledger = self._admission.ledger
        self._preparer = Preparer(context.board.wakeup.ring)
        self.prompt_disk = PromptDisk(engine.disk, self._preparer, lambda: self.ledger.prompt_cache_bytes)
        self._deadlines = Deadlines()
        self._recovery = Recovery(
            failures_max=config.engine_failures_max, window_s=config.engine_failures_window_s
        )
        self._divergences = Divergences(context.tokenizer_json if config.log_prompts else None)
        self.rows: dict[int, LiveRequest] = {}
        self._live: dict[Ticket, LiveRequest] = {}
        self._leaving: dict[int, LiveRequest] = {}
        self._growing: list[LiveRequest] = []
        self._row_ids = count()
        self._draining = False

    # --- what is there ---

    @property
    def has_work(self) -> bool:
        """Whether a pass now would do something for a request."""
        waiting = len(self._order) > 0 or self._recovery.waiting > 0 or self.prompt_disk.is_restoring
        return bool(self.rows or self._leaving) or waiting

    @property
    def is_empty(self) -> bool:
        """Whether no request is alive."""
        return not self._live

    @property
    def waiting(self) -> int:
        """How many requests have no row: preparing, queued or parked."""
        return len(self._live) - len(self.rows)

    @property
    def parked(self) -> int:
        """How many of those had one before."""
        return sum(request.phase == "parked" for request in self._live.values())

    @property
    def is_recovering(self) -> bool:
        """Whether rows of a failed step are on their way back."""
        return self._recovery.is_active

    def live(self) -> Iterator[LiveRequest]:
        """Every request that has not ended, in order of arrival."""
        return iter(list(self._live.values()))

    def waits_for(self, request: LiveRequest, now_s: float) -> str:
        """What a request without a row waits for: a word, and where it is its turn, why that is not yet. Else empty."""
        if request.phase == "preparing":
            return "preparation"
        if request.phase not in ("queued", "parked"):
            return ""
        if self._recovery.is_active:
            return "recovery"
        if self._order.first(now_s) is not request.ticket:
            return f"turn: {self._order.reason(request.ticket, now_s)}"
        return "row" if len(self.rows) >= self._engine.rows_max else "memory"

    # --- requests come and go ---

    def add(self, insert: Insert, session: Session, now_s: float) -> LiveRequest:
        """Take in a request whose ids have been checked.

        Raises `Draining`, `BadRequest`, `ContextExceeded`, `NeverFits`, `Overloaded`, `NotAuthorized` or
        `DeadlineExceeded`; then nothing of it is kept.
        """
        if self._draining:
            raise Draining("the worker is draining: it takes no new requests")
        cache_scope = self._cache_scope(insert, session)
        looking = self.prompt_disk.preparation(insert, cache_scope)
        preparation = both(preparation_of(insert, self._context.compiler), looking)
        ticket, tokens_max = self._admission.ticket(insert, session, len(self.rows), now_s)
        stops = frozenset(insert.stop_token_ids)
        request = LiveRequest(
            insert,
            session.id,
            ticket,
            seed=secrets.randbits(63) if insert.seed is None else insert.seed,
            stop_token_ids=stops if insert.ignore_eos else stops | self._context.model.eos_token_ids,
            tokens_max=tokens_max,
            cache_scope=cache_scope,
        )
        request.arrival_pass = self._counters.passes
        self._live[ticket] = request
        self._counters.accepted += 1
        session.requests[request.id] = request
        self._outgoing.accept(request)
        self._deadlines.add(request)
        self._start(request, preparation, now_s)
        return request

    def _cache_scope(self, insert: Insert, session: Session) -> str:
        """Rows of the same one share what they read. It outlives the worker, as the session's secret does."""
        scope = insert.cache_scope or self._context.config.cache_scope
        if scope == "shared":
            return ""
        if scope == "key" and session.user:
            return f"key {session.user}"
        return f"session {session.secret_digest.hex()}"

    def end(self, request: LiveRequest, finish: Finish, message: str, code: str = "") -> None:
        """Give a request its terminal answer, in whatever phase it is. `code` says more of an `error`."""
        if request.phase == "running":
            self._leaving[request.row] = request
            self._free_row(request)
        elif request.phase == "preparing":
            self._preparer.cancel(request)
        elif request.parked_row >= 0:
            # What is kept for its return need not be kept any longer.
            self._leaving[request.parked_row] = request
        self._finish(request, finish, message, code)

    def end_all(self, requests: Iterable[LiveRequest], finish: Finish, message: str) -> None:
        """End those of the requests that have not ended."""
        for request in list(requests):
            if request.end is None:
                self.end(request, finish, message)

    def expire(self, now_s: float) -> None:
        """End what has passed its deadline."""
        for request in self._deadlines.expired(now_s):
            self.end(request, "deadline", "deadline_ms passed before the last token")

    def resize(self, limit_bytes: int) -> None:
        """Take another limit of memory; it falls as far as what was promised to requests allows."""
        if limit_bytes != self.ledger.limit_bytes:
            self._admission.resize(limit_bytes, self._live.values())

    def rest(self) -> None:
        """There has been no work for a while: give back memory that would only make the next request faster."""
        self._engine.release_buffers()

    def next_deadline_s(self) -> float | None:
        """When a request runs out of time next, or None."""
        return self._deadlines.next_s()

    def drain(self) -> None:
        """Take no more requests, and end those that have not started. What has started goes on."""
        self._draining = True
        waiting = [request for request in self._live.values() if request.phase in ("preparing", "queued")]
        self.end_all(waiting, "shutdown", "the worker stopped before this request was started")

    def close(self) -> None:
        """Give up what is being prepared."""
        self._preparer.close()

    # --- the step ---

    def step(self, report: PassReport, now_s: float) -> int:
        """Drop rows that ended, admit, make one `next()`, settle; returns the nanoseconds spent in `next()`."""
        try:
            self._take_prepared(now_s)
            self._grow(now_s)
            self._drop_leaving()
            report.admitted = self._admit(now_s)
            self.ledger.settle()
            if not self.rows:
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
        self.prompt_disk.note_reading(self._accounts.step(report.tokens, step_ns))
        return step_ns

    def _drop_leaving(self) -> None:
        if self._leaving:
            self._engine.remove(list(self._leaving))
            self._leaving = {}

    def _start(self, request: LiveRequest, preparation: Preparation | None, now_s: float) -> None:
        insert = request.insert
        assert insert is not None
        if insert.emitted and insert.emitted[-1] in request.stop_token_ids:
            self._finish(request, "stop", "", "")
        elif request.tokens_held >= request.tokens_max:
            self._finish(request, "length", "", "")
        elif preparation is not None:
            self._preparer.start(request, preparation)
        else:
            self._enqueue(request, now_s)

    def _take_prepared(self, now_s: float) -> None:
        for request, error in self._preparer.finished():
            if error is None and request.is_whole:
                self._finish(request, "stop", "", "")
                continue
            if error is None:
                if not self.prompt_disk.take(request):
                    self._enqueue(request, now_s)
                continue
            code = error.code if isinstance(error, ZmqEngineError) else ""
            if not code:
                log.error("preparing failed", extra={"request": request.id}, exc_info=error)
            self._finish(request, "error", str(error), code)
        for request in self.prompt_disk.restored(is_busy=bool(self.rows)):
            self._enqueue(request, now_s)

    def _enqueue(self, request: LiveRequest, now_s: float) -> None:
        request.phase = "queued"
        self._order.enqueue(request.ticket, now_s)

    # --- who gets a row ---

    def _admit(self, now_s: float) -> int:
        admitted = 0
        while (request := self._next_to_join(now_s)) is not None:
            giving_way = self._admission.giving_way(request, self.rows.values(), now_s)
            if giving_way is None:
                break
            for row in giving_way:
                self._park(row, now_s)
            if self._recovery.is_active:
                self._recovery.joined(request)
            else:
                self._order.start(request.ticket, now_s)
            self._join(request)
            admitted += 1
        return admitted

    def _next_to_join(self, now_s: float) -> LiveRequest | None:
        if self._recovery.is_active:
            return self._recovery.next_to_join()
        if not len(self._order):
            return None
        for running in self.rows.values():
            self._accounts.charge(running)
        ticket = self._order.first(now_s)
        return None if ticket is None else self._live[ticket]

    def _join(self, request: LiveRequest) -> None:
        has_room = self._admission.reserve(request)
        assert has_room, "room was made before"
        self.prompt_disk.forget(request)
        request.phase = "running"
        request.row = next(self._row_ids)
        request.parked_row = -1
        request.joined_at = len(request.log)
        request.prefilled_tokens = 0
        self.rows[request.row] = request
        self._counters.latencies.admitted(request)
        for row, message in self._engine.insert([request.row_request(request.row)]):
            self._fail_row(row, message)

    def _grow(self, now_s: float) -> None:
        """Extend the reservations of rows that come to their end, parking others, or themselves, where it must be."""
        growing, self._growing = self._growing, []
        for request in growing:
            if request.phase == "running" and request.tokens_held >= request.tokens_max:
                # Its limit has fallen since it joined: the engine knows the one of then.
                self.end(request, "length", "")
            while request.phase == "running" and not self._admission.reserve(request):
                ticket = self._order.victim([row.ticket for row in self.rows.values()], now_s)
                assert ticket is not None, "a row that is alone fits"
                self._park(self._live[ticket], now_s)

    def _park(self, request: LiveRequest, now_s: float) -> None:
        """Take a row out of the engine. It goes on, with the same tokens, when there is room again."""
        kept = self._engine.park(request.row)
        request.parked_row = request.row
        self._free_row(request)
        self._counters.parked += 1
        log.info(
            "parked",
            extra={
                "request": request.id,
                "session": request.session_id,
                "tokens": request.tokens_held,
                "kept": kept,
            },
        )
        if not self._recovery.lost_row(request):
            self._order.enqueue(request.ticket, now_s)

    def _free_row(self, request: LiveRequest) -> None:
        """The request has no row any more: give back what was promised to it."""
        del self.rows[request.row]
        self._accounts.charge(request)
        has_decoded = len(request.log) > request.joined_at
        read = request.tokens_held - 1 if has_decoded else request.prefilled_tokens
        request.read_tokens = max(request.read_tokens, read)
        request.phase = "parked"
        request.row = -1
        self._admission.release(request)

    # --- what became of a step ---

    def _settle(self, result: StepResult) -> int:
        rows, outgoing, recovery = self.rows, self._outgoing, self._recovery
        stepped: list[LiveRequest] = []
        # Before the tokens: the last one of a row ends its request.
        for draft in result.drafts:
            self._accounts.draft(rows.get(draft.row), draft)
        for row, token, logprobs, finish in result.tokens:
            request = rows.get(row)
            if request is None:
                continue
            outgoing.token(request, token, logprobs)
            stepped.append(request)
            if request.strikes:
                recovery.made_token(request)
            if finish is not None:
                self._free_row(request)
                self._finish(request, finish, "", "")
            elif len(request.log.tokens) >= request.grows_at:
                request.grows_at = request.tokens_max
                self._growing.append(request)
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
        request = self.rows.get(prefill.row)
        if request is None:
            return
        self._accounts.prefill(request, prefill)
        # A prompt that is read in one pass has no progress to tell, only what of it was cached: a client may want to
        # say so with the first token.
        if prefill.done < prefill.total or prefill.cached or request.progress_told:
            request.progress_told = True
            self._outgoing.progress(request, prefill.done, prefill.total, prefill.cached)

    def _fail_row(self, row: int, message: str) -> None:
        request = self.rows.get(row)
        if request is not None:
            log.warning(
                "row failed", extra={"request": request.id, "session": request.session_id, "reason": message}
            )
            self._free_row(request)
            self._finish(request, "error", message, "")

    def _engine_failed(self, error: Exception, now_s: float) -> None:
        self._counters.engine_failures += 1
        in_engine = list(self.rows.values())
        log.error(
            "engine failed",
            extra={
                "requests": [request.id for request in in_engine],
                "cancelled": [request.id for request in self._leaving.values()],
            },
            exc_info=error,
        )
        guilty = self._recovery.failed(in_engine, now_s)
        if self._recovery.has_failed_too_often:
            config = self._context.config
            raise EngineBroken(
                f"{config.engine_failures_max + 1} engine failures in "
                f"{config.engine_failures_window_s:g} s, the last one: {error}"
            ) from error
        self._leaving = {}
        try:
            self._engine.reset()
        except Exception as second:
            raise EngineBroken(f"the engine could not be reset: {second}") from second
        for request in in_engine:
            self._free_row(request)
        for request in guilty:
            self._finish(request, "error", f"generating this request failed: {error}", "")

    def _finish(self, request: LiveRequest, finish: Finish, message: str, code: str) -> None:
        """The terminal answer of a request that is in no queue and has no row."""
        self._accounts.end(request)
        self._order.withdraw(request.ticket)
        self._recovery.discard(request)
        self._deadlines.discard(request)
        self.prompt_disk.forget(request)
        del self._live[request.ticket]
        phases_ms = self._counters.latencies.phases_ms(request)
        facts = (request.prompt_tokens, request.cached_tokens, code, *phases_ms, request.drafts)
        request.finish(End(finish, message, *facts))
        self._outgoing.ended(request)
        self._counters.count_end(finish)
        self._counters.latencies.ended(request)
        log.info(
            "ended",
            extra={
                "request": request.id,
                "session": request.session_id,
                "finish": finish,
                "tokens": len(request.log),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
            },
        )

    def retry_after_ms(self) -> int:
        """When it is worth trying again, from the measured rate of service."""
        return self._admission.rates.retry_after_ms()
