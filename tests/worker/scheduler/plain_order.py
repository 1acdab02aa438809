"""The order of service as lists and `min`, to compare the real one with. Slow, and easy to see through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from zmqengine.worker.requests.ticket import PriorityClass, Ticket
from zmqengine.worker.scheduler.policy import STARTS_PER_TURN


class PlainClass:
    """Counters of one class; `since` says in which order flows began to wait."""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.counters: dict[str, float] = {}
        self.since: dict[str, int] = {}
        self.virtual_time = 0.0
        self.last_start_s = 0.0
        self.passed_over = 0
        self.numbers = count()

    def flows(self) -> set[str]:
        return {one.flow for one in self.waiting}

    def advance(self) -> None:
        least = min((self.counters[flow] for flow in self.flows()), default=0.0)
        self.virtual_time = max(self.virtual_time, least)

    def first(self) -> Ticket:
        flow = min(self.flows(), key=lambda flow: (self.counters[flow], self.since[flow]))
        own = [one for one in self.waiting if one.flow == flow]
        return min(own, key=lambda one: (one.priority, one.arrival))

    def since_s(self) -> float:
        return min(self.first().waiting_since_s, self.last_start_s)

    def forget_if_idle(self) -> None:
        if not self.waiting and not self.running:
            self.counters.clear()
            self.virtual_time = 0.0


class PlainOrder:
    """The same calls as `ServiceOrder`, made after it with the same tickets."""

    def __init__(self, *, queue_max: int, ageing_s: float) -> None:
        self.classes = {kind: PlainClass() for kind in PriorityClass}
        self.queue_max = queue_max
        self.ageing_s = ageing_s
        self.prepaid: dict[int, float] = {}
        self.started: set[int] = set()
        self.kinds: dict[int, PriorityClass] = {}

    def waiting(self) -> list[Ticket]:
        return [one for plain in self.classes.values() for one in plain.waiting]

    def may_admit(self, flow: str) -> bool:
        own = sum(one.flow == flow for one in self.waiting())
        return own < self.queue_max - len(self.waiting())

    def enqueue(self, ticket: Ticket, now_s: float) -> None:
        plain = self.classes[ticket.priority_class]
        if ticket in plain.running:
            self._stop(plain, ticket)
        if not plain.waiting:
            plain.last_start_s, plain.passed_over = now_s, 0
        if ticket.flow not in plain.flows():
            plain.advance()
            plain.counters[ticket.flow] = max(plain.counters.get(ticket.flow, 0.0), plain.virtual_time)
            plain.since[ticket.flow] = next(plain.numbers)
        plain.waiting.append(ticket)

    def first(self, now_s: float) -> Ticket | None:
        filled = [plain for plain in self.classes.values() if plain.waiting]
        overdue = [plain for plain in filled[1:] if plain.passed_over >= STARTS_PER_TURN - 1]
        oldest = min(overdue, key=PlainClass.since_s, default=None)
        if oldest is not None and now_s - oldest.since_s() >= self.ageing_s:
            return oldest.first()
        return filled[0].first() if filled else None

    def start(self, ticket: Ticket, now_s: float) -> None:
        kind = ticket.priority_class
        plain = self.classes[kind]
        self.kinds[ticket.arrival] = min(
            better
            for better in PriorityClass
            if better == kind or (better < kind and self.classes[better].waiting)
        )
        plain.advance()
        plain.waiting.remove(ticket)
        plain.running.append(ticket)
        prompt = 0 if ticket.arrival in self.started else ticket.prompt_tokens
        self.started.add(ticket.arrival)
        self.prepaid[ticket.arrival] = 1.0 + 0.5 * prompt
        plain.counters[ticket.flow] += self.prepaid[ticket.arrival] / ticket.weight
        plain.last_start_s, plain.passed_over = now_s, 0
        for worse in PriorityClass:
            if worse > kind:
                self.classes[worse].passed_over += 1

    def charge(self, ticket: Ticket, read: int, made: int) -> None:
        plain = self.classes[ticket.priority_class]
        cost = 0.5 * read + made
        paid = min(cost, self.prepaid[ticket.arrival])
        self.prepaid[ticket.arrival] -= paid
        plain.counters[ticket.flow] += (cost - paid) / ticket.weight
        if not plain.waiting:
            plain.virtual_time = max(plain.virtual_time, plain.counters[ticket.flow])

    def withdraw(self, ticket: Ticket) -> None:
        plain = self.classes[ticket.priority_class]
        if ticket in plain.running:
            self._stop(plain, ticket)
        else:
            plain.advance()
            plain.waiting.remove(ticket)
        plain.forget_if_idle()

    def victim(self, running: Sequence[Ticket], *, for_: Ticket | None = None) -> Ticket | None:
        rows = [row for row in running if for_ is None or self._may_displace(for_, row, running)]
        return max(rows, key=lambda row: (self.kinds[row.arrival], row.arrival), default=None)

    def _may_displace(self, new: Ticket, row: Ticket, running: Sequence[Ticket]) -> bool:
        kind = self.kinds[row.arrival]
        if kind is PriorityClass.BATCH and new.priority_class < PriorityClass.BATCH:
            return True
        if row.flow == new.flow or not row.priority_class == kind == new.priority_class:
            return False
        rows_of = {flow: sum(one.flow == flow for one in running) for flow in (row.flow, new.flow)}
        return (rows_of[row.flow] - 1) / row.weight >= 2 * (rows_of[new.flow] + 1) / new.weight

    def _stop(self, plain: PlainClass, ticket: Ticket) -> None:
        plain.running.remove(ticket)
        plain.counters[ticket.flow] -= self.prepaid.pop(ticket.arrival) / ticket.weight
        plain.forget_if_idle()
