"""Admission: memory is promised by need, not by what a request might need in the end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from zmqengine.engine.interface import Engine
from zmqengine.errors import DeadlineExceeded, NeverFits, NotAuthorized, Overloaded
from zmqengine.protocol.messages import Insert
from zmqengine.request_rules import check_context, length_of
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.memory import MemoryLedger
from zmqengine.worker.scheduler.policy import ServiceOrder
from zmqengine.worker.scheduler.rates import ServiceRates
from zmqengine.worker.wire.session import Session


class Admission:
    """Decides; the batch acts. Owns the order of service, its measured rates and the ledger of memory.

    A row is promised memory for what it holds and `growth_tokens` more, and is promised more when it comes near. What
    one request may hold in all is bounded so that it always fits when it is alone: whoever is let in ends.
    """

    def __init__(self, context: WorkerContext, engine: Engine) -> None:
        config = context.config
        self.order = ServiceOrder(queue_max=context.limits.queued_max, ageing_s=config.ageing_s)
        self.rates = ServiceRates()
        self.ledger = MemoryLedger(
            engine,
            limit_bytes=context.memory_limit_bytes,
            prompt_cache_share=config.prompt_cache_share,
            prompt_cache_bytes=config.prompt_cache_bytes,
        )
        self._engine = engine
        # A row's cache is this much ahead of its output: the tokens being looked at, and those being computed.
        self._ahead_tokens = 2 * engine.step_tokens_max
        self._growth_tokens = max(config.growth_tokens, self._ahead_tokens)
        self._shares, self._priorities_min = config.shares, config.priorities_min
        self._context_tokens = context.limits.context_tokens_max
        self._tokens_max = self.ledger.largest_tokens(self._context_tokens)
        self._arrivals = count()

    def resize(self, limit_bytes: int, live: Iterable[LiveRequest]) -> None:
        """Take another limit of memory. Whoever of the `live` requests was let in still ends.

        Those that named no limit of their own may come to hold less from now on, but what they hold or were promised.
        """
        live = list(live)
        least = {request: request.tokens_held + 1 for request in live}
        largest = max(
            (least[request] if request.is_open else request.tokens_max for request in live), default=0
        )
        # The ledger does not fall below what was promised.
        self.ledger.resize(limit_bytes, self._engine.project_bytes(largest))
        self._tokens_max = self.ledger.largest_tokens(self._context_tokens)
        for request in live:
            if request.is_open:
                request.tokens_max = min(request.tokens_max, max(self._tokens_max, least[request]))

    def ticket(self, insert: Insert, session: Session, rows: int, now_s: float) -> tuple[Ticket, int]:
        """The place of a new request in the order of service, and the tokens of prompt and output it may come to hold.

        `rows` of the engine are taken. Raises `ContextExceeded`, `NeverFits`, `Overloaded`, `NotAuthorized`, or
        `DeadlineExceeded` when there is no hope to end in time.
        """
        tokens_max = self._tokens_allowed(insert)
        # Who has a key is charged by it, however many sessions it opens.
        flow = session.user or session.id
        if not self.order.may_enqueue(flow):
            raise Overloaded(
                f"{len(self.order)} requests are waiting already, {self.order.waiting_of(flow)} of them from this "
                "front-end, which may have no more of them than places are left in the queue",
                retry_after_ms=self.rates.retry_after_ms(),
            )
        urgency = int(self._priorities_min.of(session.client, session.user))
        if insert.priority < urgency:
            raise NotAuthorized(
                f"priority {insert.priority} is not allowed for this front-end: {urgency} is the most urgent"
            )
        ticket = Ticket(
            flow=flow,
            weight=self._shares.of(session.client, session.user),
            priority=insert.priority,
            prompt_tokens=len(insert.prompt),
            max_tokens=insert.max_tokens,
            arrival=next(self._arrivals),
            waiting_since_s=now_s,
            deadline_s=None if insert.deadline_ms is None else now_s + insert.deadline_ms / 1000,
        )
        self._check_deadline(ticket, rows, now_s)
        return ticket, tokens_max

    def giving_way(
        self, request: LiveRequest, rows: Iterable[LiveRequest], now_s: float
    ) -> list[LiveRequest] | None:
        """Which rows must be parked so that the request can have one now; None when it has to wait."""
        staying = {row.ticket: row for row in rows}
        going: list[LiveRequest] = []
        needed = self._reservation(request)[1]
        while not self._has_room(list(staying.values()), needed - sum(row.reserved_bytes for row in going)):
            ticket = self.order.victim(staying, now_s, for_=request.ticket, between_flows=True)
            if ticket is None:
                return None
            going.append(staying.pop(ticket))
        return going

    def reserve(self, request: LiveRequest) -> bool:
        """Promise memory for what the request holds and a step of growth; False when there is not enough."""
        tokens, bytes_ = self._reservation(request)
        if not self.ledger.fits(bytes_ - request.reserved_bytes):
            return False
        self.ledger.change(bytes_ - request.reserved_bytes)
        request.reserved_tokens, request.reserved_bytes = tokens, bytes_
        is_all = tokens >= request.tokens_max
        request.grows_at = tokens - request.prompt_tokens - (0 if is_all else self._ahead_tokens)
        return True

    def release(self, request: LiveRequest) -> None:
        """The request has no row any more."""
        self.ledger.change(-request.reserved_bytes)
        request.reserved_tokens = request.reserved_bytes = 0

    def _tokens_allowed(self, insert: Insert) -> int:
        """The output tokens that the request asks for, or all that fit."""
        check_context(insert.prompt, insert.max_tokens, self._context_tokens)
        wanted = len(insert.prompt) + (insert.max_tokens or 1)
        if wanted > self._tokens_max:
            raise NeverFits(
                f"{length_of(insert.prompt, insert.max_tokens)} needs {self._engine.project_bytes(wanted)} bytes of KV "
                f"cache, the worker has {self.ledger.kv_bytes_max}: the largest request that fits has "
                f"{self._tokens_max} tokens of prompt and output; shorten it or raise --memory-limit"
            )
        return self._tokens_max if insert.max_tokens is None else wanted

    def _check_deadline(self, ticket: Ticket, rows: int, now_s: float) -> None:
        if ticket.deadline_s is None:
            return
        estimate = self.rates.meets_deadline(
            ticket,
            now_s,
            places_ahead=self.order.places_ahead(ticket.flow, ticket.priority),
            row_is_free=rows < self._engine.rows_max,
        )
        if not estimate.met:
            raise DeadlineExceeded(
                f"deadline_ms cannot be met: {estimate}", retry_after_ms=self.rates.retry_after_ms()
            )

    def _has_room(self, rows: list[LiveRequest], needed_bytes: int) -> bool:
        if len(rows) >= self._engine.rows_max or not self.ledger.fits(needed_bytes):
            return False
        # Room for one more step of everybody's growth: who joins now shall not be parked for it in the next pass.
        growth = sum(self._reservation(row)[1] - row.reserved_bytes for row in rows)
        return self.ledger.fits(needed_bytes + growth)

    def _reservation(self, request: LiveRequest) -> tuple[int, int]:
        """Tokens that suffice for what the request holds, or was promised, and a step of growth; and their bytes."""
        held = max(request.tokens_held, request.reserved_tokens)
        tokens = min(held + self._growth_tokens, request.tokens_max)
        return tokens, self._engine.project_bytes(tokens)
