"""Baselines that the scheduler's order is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.indexed_heap import IndexedHeap


class Line(Protocol):
    """What the replay needs of an order of service; `ServiceOrder` says what each call means."""

    def enqueue(self, ticket: Ticket, now_s: float) -> None: ...
    def first(self, now_s: float) -> Ticket | None: ...
    def start(self, ticket: Ticket, now_s: float) -> None: ...
    def charge(self, ticket: Ticket, prefill_tokens: int, decode_tokens: int) -> None: ...
    def withdraw(self, ticket: Ticket) -> None: ...
    def victim(self, running: Iterable[Ticket], *, for_: Ticket | None = None) -> Ticket | None: ...


class FirstComeFirstServed:
    """By arrival, or by priority and arrival. Without memory the youngest or the least urgent row is preempted."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._line: IndexedHeap[Ticket] = IndexedHeap()

    def enqueue(self, ticket: Ticket, now_s: float) -> None:
        """Put it in line by its key: a parked one is ahead again."""
        self._line.push(ticket, self._key(ticket))

    def first(self, now_s: float) -> Ticket | None:
        """The least key."""
        entry = self._line.first()
        return entry and entry[1]

    def start(self, ticket: Ticket, now_s: float) -> None:
        """It leaves the line."""
        self._line.remove(ticket)

    def charge(self, ticket: Ticket, prefill_tokens: int, decode_tokens: int) -> None:
        """Nobody counts."""

    def withdraw(self, ticket: Ticket) -> None:
        """Running requests are not held here."""
        if ticket in self._line:
            self._line.remove(ticket)

    def victim(self, running: Iterable[Ticket], *, for_: Ticket | None = None) -> Ticket | None:
        """The greatest key; nobody makes room for another."""
        return max(running, key=self._key, default=None) if for_ is None else None

    def _key(self, ticket: Ticket) -> tuple[float, int]:
        return (ticket.priority if self._by_priority else 0, ticket.arrival)
