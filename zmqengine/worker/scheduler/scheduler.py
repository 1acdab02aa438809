"""The scheduler: decides which request runs next, which waits and which is preempted.

A request is *waiting* (phase `queued` before its first row, `parked` after it lost one), *running* (it has a row of the
engine), or outside the scheduler (`preparing`, `ended`). `schedule` runs before every engine step:

1. Grow. A row that nears the end of its KV cache reservation gets a larger one. While memory is short, the youngest row
   of the worst class is preempted; that may be the growing row itself.
2. Remove the rows of requests that ended.
3. Admit. `policy.ServiceOrder` names the first waiting request; nothing overtakes it, or a large request would starve,
   but while its prompt is read from disk.
   It starts if there is a row, memory for its tokens and `growth_tokens` more, and memory for the next growth of every
   running row. Otherwise the policy may let it preempt rows, and if that does not make room either, admission stops.

A preempted request keeps its arrival in the order of service and resumes with the same tokens. Preemption ends: no
request may hold more memory than fits alone, and the oldest row of the best class is never preempted for memory while
another row runs, so it finishes, and then the next one. Preemption for another request ends by the policy's rules 5, 6.

After a failed engine step `recovery` decides who is admitted, one suspect at a time, until every row is back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

from zmqengine.engine.interface import Engine, RowFailure, RowPrefill, VectorEngine
from zmqengine.errors import DeadlineExceeded, NeverFits, Overloaded
from zmqengine.request_rules import check_context, length_of
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.process.memory_pressure import Level
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.memory_ledger import MemoryLedger
from zmqengine.worker.scheduler.policy import ServiceOrder
from zmqengine.worker.scheduler.rates import ServiceRates
from zmqengine.worker.scheduler.recovery import Recovery

log = logging.getLogger("zmqengine.worker")


class Away(Protocol):
    """A part of the worker that may delay a request whose turn has come: the restore of its prompt from disk."""

    def takes(self, request: LiveRequest, now_s: float) -> bool:
        """Whether it takes over a request whose turn has come, to queue it again later; others may start."""
        ...


class Scheduler:
    """Owns the waiting and the running requests, and is the only caller of the engine's `insert`, `park` and `remove`.

    `running` maps engine row ids to requests, and `leaving` the rows of ended requests that the engine still holds.
    `order`, `memory`, `rates` and `recovery` hold the facts it decides from; none of them knows the scheduler.
    """

    def __init__(self, context: WorkerContext, engine: Engine | VectorEngine) -> None:
        config = context.config
        self.order = ServiceOrder(queue_max=context.limits.queued_max, ageing_s=config.ageing_s)
        self.rates = ServiceRates()
        self.memory = MemoryLedger(
            engine,
            limit_bytes=context.memory_limit_bytes,
            prompt_cache_share=config.prompt_cache_share,
            prompt_cache_bytes=config.prompt_cache_bytes,
        )
        self.recovery = Recovery(
            failures_max=config.engine_failures_max, window_s=config.engine_failures_window_s
        )
        self.running: dict[int, LiveRequest] = {}
        self.leaving: dict[int, LiveRequest] = {}
        self.pressure: Level = "normal"
        self.away: Away | None = None
        self._engine = engine
        self._generator = engine if isinstance(engine, Engine) else None
        self._counters = context.counters
        # A row's KV cache is up to two steps ahead of its output: the step being settled and the one in flight.
        self._ahead_tokens = 0 if self._generator is None else 2 * self._generator.step_tokens_max
        self._growth_tokens = max(config.growth_tokens, self._ahead_tokens)
        self._context_tokens = context.limits.context_tokens_max
        self._tokens_max = self.memory.largest_tokens(self._context_tokens)
        self._waiting: dict[Ticket, LiveRequest] = {}
        self._growing: list[LiveRequest] = []
        self._row_ids = count()
        self._prefill_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step now would serve a request or remove a row."""
        return bool(self.running or self.leaving or len(self.order) or self.recovery.waiting)

    def waits_for(self, request: LiveRequest, now_s: float) -> str:
        """The reason for which a waiting request waits, for `status`: a word or a short sentence."""
        if self.recovery.is_active:
            return "recovery"
        if self.order.first(now_s) is not request.ticket:
            return f"turn: {self.order.reason(request.ticket, now_s)}"
        if len(self.running) >= self._engine.rows_max:
            return "row"
        return "memory: the system has too little left" if self.pressure == "critical" else "memory"

    # --- admission control: may a new request wait at all? ---

    def allowed_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Prompt and output tokens that a request may hold; without `max_tokens`, the number that fits in memory alone.

        Raises `ContextExceeded` or `NeverFits`.
        """
        check_context(prompt, max_tokens, self._context_tokens)
        wanted = len(prompt) + (max_tokens or 1)
        self.check_fits(wanted, length_of(prompt, max_tokens))
        return self._tokens_max if max_tokens is None else wanted

    def check_fits(self, tokens: int, named: str) -> None:
        """Raise `NeverFits` for a request of more `tokens` than fit in memory alone, `named` so in the error."""
        if tokens > self._tokens_max:
            raise NeverFits(
                f"{named} needs {self.memory.project_bytes(tokens)} bytes of KV "
                f"cache, the worker has {self.memory.kv_bytes_max}: the largest request that fits has "
                f"{self._tokens_max} tokens of prompt and output; shorten it or raise --memory-limit"
            )

    def check_queue(self, flow: str) -> None:
        """Raise `Overloaded` if this flow may not have another request without a row."""
        if not self.order.may_admit(flow):
            raise Overloaded(
                f"{self.order.places} requests are waiting already, {self.order.places_of(flow)} of them from this "
                "front-end, which may have no more of them than places are left in the queue",
                retry_after_ms=self.rates.retry_after_ms(),
            )

    def check_deadline(self, ticket: Ticket, now_s: float) -> None:
        """Raise `DeadlineExceeded` if the measured rates say that the deadline cannot be met."""
        if ticket.deadline_s is None:
            return
        estimate = self.rates.meets_deadline(
            ticket,
            now_s,
            places_ahead=self.order.places_ahead(ticket.flow, ticket.priority),
            row_is_free=len(self.running) < self._engine.rows_max,
        )
        if not estimate.met:
            raise DeadlineExceeded(
                f"deadline_ms cannot be met: {estimate}", retry_after_ms=self.rates.retry_after_ms()
            )

    # --- the decision: who runs in the next step ---

    def admit(self, request: LiveRequest) -> None:
        """Give a new request its place in the queue, which it has while it is prepared, too."""
        self.order.admit(request.ticket)

    def enqueue(self, request: LiveRequest, now_s: float) -> None:
        """Let an admitted request wait for its first row."""
        request.phase = "queued"
        self._wait(request, now_s)

    def schedule(self, now_s: float) -> Iterator[tuple[LiveRequest, list[RowFailure]]]:
        """Choose the rows of the next step: grow, remove, admit.

        Yields each admitted request with the failures that the engine reported for it; the caller frees the rows that
        failed before it asks for the next one.
        """
        self._grow(now_s)
        if self.leaving:
            self._engine.remove(list(self.leaving))
            self.leaving = {}
        while (request := self._first(now_s)) is not None:
            preempted = self._rows_to_preempt(request)
            if preempted is None:
                break
            if self.away is not None and self.away.takes(request, now_s):
                self._set_aside(request)
                continue
            for row in preempted:
                self._preempt(row, now_s)
            yield request, self._start(request, now_s)
        self.memory.settle()

    def _first(self, now_s: float) -> LiveRequest | None:
        """The waiting request that is served next."""
        if self.recovery.is_active:
            return self.recovery.next_to_join()
        if not len(self.order) or (self.pressure == "critical" and self.running):
            return None
        # The order goes by what each flow has been served up to now.
        for running in self.running.values():
            self._charge(running)
        ticket = self.order.first(now_s)
        return None if ticket is None else self._waiting[ticket]

    def _rows_to_preempt(self, request: LiveRequest) -> list[LiveRequest] | None:
        """Rows to preempt so that this request can start now, often none; None if it has to wait."""
        staying = {row.ticket: row for row in self.running.values()}
        preempted: list[LiveRequest] = []
        needed_bytes = self._reservation(request)[1]
        while not self._has_room(staying.values(), needed_bytes):
            ticket = self.order.victim(staying, for_=request.ticket)
            if ticket is None:
                return None
            preempted.append(staying.pop(ticket))
            needed_bytes -= preempted[-1].reserved_bytes
        return preempted

    def _has_room(self, rows: Iterable[LiveRequest], needed_bytes: int) -> bool:
        """Whether a request that needs `needed_bytes` can start beside these rows."""
        rows = list(rows)
        if len(rows) >= self._engine.rows_max or not self.memory.fits(needed_bytes):
            return False
        # Without room for the next growth of every row, the new one would be preempted for it in the next pass.
        growth_bytes = sum(self._reservation(row)[1] - row.reserved_bytes for row in rows)
        return self.memory.fits(needed_bytes + growth_bytes)

    def _grow(self, now_s: float) -> None:
        """Extend the reservations of rows that near their end, preempting the last in order while memory is short."""
        growing, self._growing = self._growing, []
        for request in growing:
            while request.phase == "running" and not self._reserve(request):
                rows = {row.ticket: row for row in self.running.values()}
                ticket = self.order.victim(rows)
                assert ticket is not None, "a row that is alone fits"
                self._preempt(rows[ticket], now_s)

    # --- transitions ---

    def _wait(self, request: LiveRequest, now_s: float) -> None:
        self._waiting[request.ticket] = request
        self.order.enqueue(request.ticket, now_s)

    def _start(self, request: LiveRequest, now_s: float) -> list[RowFailure]:
        """Waiting to running: reserve memory and insert a row; returns the engine's failures."""
        if self.recovery.is_active:
            self.recovery.joined(request)
        else:
            self.order.start(request.ticket, now_s)
            del self._waiting[request.ticket]
        has_room = self._reserve(request)
        assert has_room, "room was made before"
        request.phase = "running"
        request.row = next(self._row_ids)
        request.parked_row = -1
        request.joined_at = request.output_tokens
        request.prefilled_tokens = 0
        self.running[request.row] = request
        self._counters.latencies.admitted(request)
        if request.embeds:
            return self._engine.embed([request.texts_request(request.row)])
        assert self._generator is not None, "the model was checked"
        return self._generator.insert([request.row_request(request.row)])

    def _set_aside(self, request: LiveRequest) -> None:
        """Waiting to preparing: the request keeps its place and its arrival, and delays no other."""
        del self._waiting[request.ticket]
        self.order.set_aside(request.ticket)
        request.phase = "preparing"

    def _preempt(self, request: LiveRequest, now_s: float) -> None:
        """Running to waiting. The prefix cache keeps the row's tokens for its return, if it has room."""
        kept = 0
        if self._generator is not None:
            kept = self._generator.park(request.row)
        else:
            self._engine.remove([request.row])
        request.parked_row = request.row
        self.free(request)
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
        if not self.recovery.preempted(request):
            self._wait(request, now_s)

    def free(self, request: LiveRequest) -> None:
        """Free the row and the memory of a request whose row the engine has dropped or is about to drop."""
        del self.running[request.row]
        self._charge(request)
        has_decoded = request.output_tokens > request.joined_at
        read = request.tokens_held - 1 if has_decoded else request.prefilled_tokens
        # An embed's next row begins at its first text without a vector, and reads none twice.
        request.read_tokens = 0 if request.embeds else max(request.read_tokens, read)
        request.phase = "parked"
        request.row = -1
        self.memory.change(-request.reserved_bytes)
        request.reserved_tokens = request.reserved_bytes = 0

    def free_all(self) -> None:
        """Free every row, after the engine was reset."""
        self.leaving = {}
        for request in list(self.running.values()):
            self.free(request)

    def finish(self, request: LiveRequest) -> None:
        """Forget a request that ends, in any phase; its row, if it has one, is removed before the next step."""
        if request.phase == "running":
            self.leaving[request.row] = request
            self.free(request)
        elif request.parked_row >= 0:
            self.leaving[request.parked_row] = request
        if request.ticket.has_started:
            self.rates.note_end(request.output_tokens)
        self._waiting.pop(request.ticket, None)
        self.order.withdraw(request.ticket)
        self.recovery.discard(request)

    # --- KV cache memory ---

    def needs_growth(self, request: LiveRequest) -> None:
        """Note a row whose output reached `grows_at`; the next `schedule` extends its reservation."""
        request.grows_at = request.tokens_max
        self._growing.append(request)

    def rows_at_limit(self) -> list[LiveRequest]:
        """Rows that may not grow because their limit has fallen since they started; the engine has the old one."""
        return [
            request
            for request in self._growing
            if request.phase == "running" and request.tokens_held >= request.tokens_max
        ]

    def resize(self, limit_bytes: int, live: Sequence[LiveRequest]) -> None:
        """Change the memory limit. Every live request can still finish: the limit stays above what they may need.

        `tokens_max` of open requests may fall, but not below the tokens that they hold or have reserved.
        """
        if limit_bytes != self.memory.limit_bytes:
            self._resize(limit_bytes, live)

    def refit(self, live: Sequence[LiveRequest]) -> None:
        """Divide the memory anew: the weights have another size."""
        self._resize(self.memory.limit_bytes, live)

    def make_room(self, bytes_: int, named: str, live: Sequence[LiveRequest]) -> None:
        """Leave rows and the prefix cache less, until `refit`, for `bytes_` of weights, `named` so in the error.

        Raises `NeverFits`, or `Overloaded` where live requests need the memory.
        """
        memory = self.memory
        left_bytes = memory.kv_bytes_max - bytes_
        told = f"{named} needs {bytes_} bytes while it is loaded"
        if left_bytes < memory.project_bytes(2):
            raise NeverFits(
                f"{told}, and beside the weights there are {memory.kv_bytes_max}: raise --memory-limit or unload "
                "another one"
            )
        needed_bytes = max(memory.reserved_bytes, memory.project_bytes(self._largest(live)))
        if left_bytes < needed_bytes:
            raise Overloaded(
                f"{told}, and of {memory.kv_bytes_max} beside the weights requests need {needed_bytes} now",
                retry_after_ms=self.rates.retry_after_ms(),
            )
        memory.make_room(bytes_)

    def _largest(self, live: Sequence[LiveRequest]) -> int:
        """The most tokens that a live request may need."""
        return max(
            (request.tokens_held + 1 if request.is_open else request.tokens_max for request in live),
            default=0,
        )

    def _resize(self, limit_bytes: int, live: Sequence[LiveRequest]) -> None:
        least = {request: request.tokens_held + 1 for request in live}
        self.memory.resize(limit_bytes, self.memory.project_bytes(self._largest(live)))
        self._tokens_max = self.memory.largest_tokens(self._context_tokens)
        for request in live:
            if request.is_open:
                request.tokens_max = min(request.tokens_max, max(self._tokens_max, least[request]))

    def relieve(self, level: Level) -> None:
        """Follow the system's memory pressure: the prefix cache gives way first.

        Under critical pressure no request starts while others run; a single one does, so that every request ends.
        """
        self.pressure = level
        self.memory.relieve(level)

    def _reserve(self, request: LiveRequest) -> bool:
        """Reserve memory for the tokens a request holds and one growth; False if it does not fit."""
        tokens, bytes_ = self._reservation(request)
        if not self.memory.fits(bytes_ - request.reserved_bytes):
            return False
        self.memory.change(bytes_ - request.reserved_bytes)
        request.reserved_tokens, request.reserved_bytes = tokens, bytes_
        is_all = tokens >= request.tokens_max
        request.grows_at = tokens - request.prompt_tokens - (0 if is_all else self._ahead_tokens)
        return True

    def _reservation(self, request: LiveRequest) -> tuple[int, int]:
        """Tokens and bytes of a request's next reservation: its present tokens or reservation, and one growth."""
        held = max(request.tokens_held, request.reserved_tokens)
        tokens = min(held + self._growth_tokens, request.tokens_max)
        return tokens, self.memory.project_bytes(tokens)

    # --- charging: flows pay for tokens, and steps are measured ---

    def note_prefill(self, request: LiveRequest, prefill: RowPrefill) -> None:
        """Record the progress of a row's prefill, and charge its flow for prefilled tokens."""
        _, done, total, cached, request.kept_tokens = prefill
        if not request.prefilled_tokens:
            self._note_prefill_start(request, total, cached)
        read = done - max(request.prefilled_tokens, cached)
        if read > 0:
            self._prefill_tokens += read
            # A flow does not pay for tokens that a preempted row prefills again.
            first_time = done - max(request.prefilled_tokens, cached, request.read_tokens)
            if first_time > 0:
                self.order.charge(request.ticket, first_time, 0)
        request.prefilled_tokens = done

    def note_step(self, decode_tokens: int, rows: int, step_s: float) -> float | None:
        """Measure a step in which `rows` decoded. Returns prefill tokens a second if the step prefilled any."""
        prefill_tokens, self._prefill_tokens = self._prefill_tokens, 0
        self.rates.note_step(prefill_tokens, decode_tokens, step_s, rows)
        if not prefill_tokens:
            return None
        self.order.prefill_cost = self.rates.prefill_cost
        return self.rates.prefill_tokens_per_s

    def _charge(self, request: LiveRequest) -> None:
        """Charge a running request's flow for the output tokens since the last charge."""
        tokens = request.output_tokens - request.charged_tokens
        # Forced tokens are charged as prefill.
        if tokens > 0:
            request.charged_tokens += tokens
            self.order.charge(request.ticket, 0, tokens)

    def _note_prefill_start(self, request: LiveRequest, total: int, cached: int) -> None:
        counters = self._counters
        if request.prefill_pass < 0:
            request.cached_tokens = min(cached, request.prompt_tokens)
            request.prefill_pass = counters.passes
            self.rates.note_prompt(total, cached)
            waited = request.prefill_pass - request.arrival_pass + 1
            counters.admission_wait_passes_max = max(counters.admission_wait_passes_max, waited)
        # The engine prefills the last token of every row that it inserts, so that one does not count as read again.
        counters.tokens_read_again += max(0, min(request.read_tokens, total - 1) - cached)
