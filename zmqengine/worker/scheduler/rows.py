"""The rows of the engine: who waits for one, who has one, and who gives way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count

from zmqengine.engine.interface import Engine, RowFailure
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.recovery import Recovery
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.accounts import Accounts
from zmqengine.worker.scheduler.admission import Admission

log = logging.getLogger("zmqengine.worker")


class Rows:
    """Gives rows as `admission` says, or after a failed step as `recovery` does, and takes them back.

    `running` are the requests that have one, by its number; `leaving` those whose row, or what is kept for its return,
    the engine is still to drop. Memory is promised by need: a row has room for what it holds and for a little growth,
    and when there is none left the row that comes last in the order of service is parked until there is.
    """

    def __init__(self, context: WorkerContext, engine: Engine) -> None:
        config = context.config
        self._engine = engine
        self._counters = context.counters
        self.admission = Admission(context, engine)
        self.accounts = Accounts(context.counters, self.admission)
        self.recovery = Recovery(
            failures_max=config.engine_failures_max, window_s=config.engine_failures_window_s
        )
        self.running: dict[int, LiveRequest] = {}
        self.leaving: dict[int, LiveRequest] = {}
        self._order = self.admission.order
        self._waiting: dict[Ticket, LiveRequest] = {}
        self._growing: list[LiveRequest] = []
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something for one of these."""
        return bool(self.running or self.leaving or len(self._order) or self.recovery.waiting)

    def waits_for(self, request: LiveRequest, now_s: float) -> str:
        """The reason why a queued request waits, in a word or a short sentence."""
        if self.recovery.is_active:
            return "recovery"
        if self._order.first(now_s) is not request.ticket:
            return f"turn: {self._order.reason(request.ticket, now_s)}"
        return "row" if len(self.running) >= self._engine.rows_max else "memory"

    # --- into a row ---

    def enqueue(self, request: LiveRequest, now_s: float) -> None:
        """Put a request in line for its first row."""
        request.phase = "queued"
        self._line_up(request, now_s)

    def admit(self, now_s: float) -> Iterator[tuple[LiveRequest, list[RowFailure]]]:
        """Give a row to all who may have one now, parking others for them where that is due.

        Tells of each who it is, and with what the engine refused it, if it did.
        """
        while (request := self._next(now_s)) is not None:
            giving_way = self.admission.giving_way(request, self.running.values(), now_s)
            if giving_way is None:
                break
            for row in giving_way:
                self._park(row, now_s)
            if self.recovery.is_active:
                self.recovery.joined(request)
            else:
                self._order.start(request.ticket, now_s)
                del self._waiting[request.ticket]
            yield request, self._join(request)

    def _next(self, now_s: float) -> LiveRequest | None:
        if self.recovery.is_active:
            return self.recovery.next_to_join()
        if not len(self._order):
            return None
        for running in self.running.values():
            self.accounts.charge(running)
        ticket = self._order.first(now_s)
        return None if ticket is None else self._waiting[ticket]

    def _join(self, request: LiveRequest) -> list[RowFailure]:
        has_room = self.admission.reserve(request)
        assert has_room, "room was made before"
        request.phase = "running"
        request.row = next(self._ids)
        request.parked_row = -1
        request.joined_at = len(request.log)
        request.prefilled_tokens = 0
        self.running[request.row] = request
        self._counters.latencies.admitted(request)
        return self._engine.insert([request.row_request(request.row)])

    def _line_up(self, request: LiveRequest, now_s: float) -> None:
        self._waiting[request.ticket] = request
        self._order.enqueue(request.ticket, now_s)

    # --- while it has one ---

    def note_growth(self, request: LiveRequest) -> None:
        """Its output has come near the end of what was promised: `grow` promises it more."""
        request.grows_at = request.tokens_max
        self._growing.append(request)

    def full(self) -> list[LiveRequest]:
        """Rows that may not grow: their limit has fallen since they joined, and the engine knows the one of then."""
        return [
            request
            for request in self._growing
            if request.phase == "running" and request.tokens_held >= request.tokens_max
        ]

    def grow(self, now_s: float) -> None:
        """Extend the reservations of rows that come to their end, parking others, or themselves, where it must be."""
        growing, self._growing = self._growing, []
        for request in growing:
            while request.phase == "running" and not self.admission.reserve(request):
                rows = {row.ticket: row for row in self.running.values()}
                ticket = self._order.victim(rows, now_s)
                assert ticket is not None, "a row that is alone fits"
                self._park(rows[ticket], now_s)

    # --- out of a row ---

    def _park(self, request: LiveRequest, now_s: float) -> None:
        """Take a row out of the engine. It goes on, with the same tokens, when there is room again."""
        kept = self._engine.park(request.row)
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
        if not self.recovery.lost_row(request):
            self._line_up(request, now_s)

    def free(self, request: LiveRequest) -> None:
        """The engine has no row of the request any more: give back what was promised to it."""
        del self.running[request.row]
        self.accounts.charge(request)
        has_decoded = len(request.log) > request.joined_at
        read = request.tokens_held - 1 if has_decoded else request.prefilled_tokens
        request.read_tokens = max(request.read_tokens, read)
        request.phase = "parked"
        request.row = -1
        self.admission.release(request)

    def free_all(self) -> list[LiveRequest]:
        """Free every row of an engine that was reset; returns their requests."""
        self.leaving = {}
        lost = list(self.running.values())
        for request in lost:
            self.free(request)
        return lost

    def leave(self, request: LiveRequest) -> None:
        """A request ends: its row, or what is kept for its return, is dropped before the next step."""
        if request.phase == "running":
            self.leaving[request.row] = request
            self.free(request)
        elif request.parked_row >= 0:
            self.leaving[request.parked_row] = request

    def forget(self, request: LiveRequest) -> None:
        """A request has ended: nobody waits for a row for it any more."""
        self._waiting.pop(request.ticket, None)
        self._order.withdraw(request.ticket)
        self.recovery.discard(request)

    def drop_leaving(self) -> None:
        """Have the engine drop the rows of those that have ended."""
        if self.leaving:
            self._engine.remove(list(self.leaving))
            self.leaving = {}
