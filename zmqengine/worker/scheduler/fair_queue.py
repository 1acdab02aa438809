"""Fair queue of one priority class: weighted fair queueing between flows, by the cost each was served."""

from __future__ import annotations

from itertools import count

from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.indexed_heap import IndexedHeap


class _Account:
    """One flow in one class. `counter` is its virtual time: the cost it was served, divided by its weight."""

    __slots__ = ("counter", "flow", "line", "running", "since")

    def __init__(self, flow: str) -> None:
        self.flow = flow
        self.counter = 0.0
        self.since = 0
        self.running = 0
        self.line: IndexedHeap[Ticket] = IndexedHeap()


class FairQueue:
    """Waiting requests of one class: the least served flow first; in a flow by priority number, then arrival.

    `passed_over` counts the starts of better classes since one of this class started, or began to wait.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.passed_over = 0
        self._last_start_s = 0.0
        self._running = 0
        self._virtual_time = 0.0
        self._accounts: dict[str, _Account] = {}
        # A counter grows while its flow waits; its key here is updated lazily, at the top, and never exceeds it.
        self._flows: IndexedHeap[_Account] = IndexedHeap()
        # Flows without requests that were served more than others. Forgetting them would forgive what they owe.
        self._debtors: IndexedHeap[_Account] = IndexedHeap()
        self._numbers = count()

    @property
    def flows(self) -> int:
        """Number of flows with waiting requests."""
        return len(self._flows)

    def waiting_of(self, flow: str) -> int:
        """Number of waiting requests of a flow."""
        account = self._accounts.get(flow)
        return len(account.line) if account else 0

    def heads_flow(self, ticket: Ticket) -> bool:
        """Whether a waiting request is the first of its flow."""
        first = self._accounts[ticket.flow].line.first()
        return first is not None and first[1] is ticket

    def places_ahead(self, flow: str) -> int:
        """Estimate of the requests that start before one more of this flow, if flows take turns."""
        waiting = self.waiting_of(flow)
        others = self.waiting - waiting
        return waiting + min(others, (waiting + 1) * (self.flows - bool(waiting)))

    def push(self, ticket: Ticket, now_s: float) -> None:
        """Queue a request. A flow that had none waiting starts level with the least served."""
        if not self.waiting:
            self.passed_over = 0
            self._last_start_s = now_s
        account = self._account(ticket.flow)
        if not len(account.line):
            self._advance()
            account.counter = max(account.counter, self._virtual_time)
            account.since = next(self._numbers)
            self._flows.push(account, (account.counter, account.since))
        account.line.push(ticket, (ticket.priority, ticket.arrival))
        self.waiting += 1

    def first(self) -> Ticket | None:
        """The first request of the flow that has been served least."""
        account = self._least_served()
        if account is None:
            return None
        entry = account.line.first()
        assert entry is not None, "a flow in line has a request in line"
        return entry[1]

    def unserved_since_s(self) -> float:
        """Time from which the class counts as unserved: its first request's arrival or its last start, the earlier.

        The first request alone would not do: a flow can put a new one before its own again and again.
        """
        first = self.first()
        return self._last_start_s if first is None else min(first.waiting_since_s, self._last_start_s)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting request."""
        self._close(self._leave_line(ticket))

    def start(self, ticket: Ticket, prepaid: float, now_s: float) -> None:
        """Move a request from waiting to running, and charge its flow `prepaid` in advance."""
        account = self._leave_line(ticket)
        account.running += 1
        self._running += 1
        account.counter += prepaid / ticket.weight
        ticket.prepaid_cost = prepaid
        self.passed_over = 0
        self._last_start_s = now_s

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a running request's flow for a cost, first out of what it has prepaid."""
        paid = min(cost, ticket.prepaid_cost)
        ticket.prepaid_cost -= paid
        account = self._accounts[ticket.flow]
        account.counter += (cost - paid) / ticket.weight
        if not self.waiting:
            # This service kept no flow waiting, so it gives none that arrives later an advantage.
            self._virtual_time = max(self._virtual_time, account.counter)

    def stop(self, ticket: Ticket) -> None:
        """Stop a running request, and refund what it prepaid and did not use."""
        account = self._accounts[ticket.flow]
        account.running -= 1
        self._running -= 1
        account.counter -= ticket.prepaid_cost / ticket.weight
        ticket.prepaid_cost = 0.0
        if account in self._flows:
            self._flows.rekey(account, (account.counter, account.since))
        self._close(account)

    def _leave_line(self, ticket: Ticket) -> _Account:
        self._advance()
        account = self._accounts[ticket.flow]
        account.line.remove(ticket)
        self.waiting -= 1
        if not len(account.line):
            self._flows.remove(account)
        return account

    def _account(self, flow: str) -> _Account:
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = _Account(flow)
        elif account in self._debtors:
            self._debtors.remove(account)
        return account

    def _least_served(self) -> _Account | None:
        while (entry := self._flows.first()) is not None:
            (counter, _), account = entry
            if counter == account.counter:
                return account
            self._flows.rekey(account, (account.counter, account.since))
        return None

    def _advance(self) -> None:
        """Advance virtual time to the least counter of the waiting flows; it never goes back."""
        least = self._least_served()
        if least is not None:
            self._virtual_time = max(self._virtual_time, least.counter)
        while (entry := self._debtors.first()) is not None and entry[0][0] <= self._virtual_time:
            self._debtors.remove(entry[1])
            del self._accounts[entry[1].flow]

    def _close(self, account: _Account) -> None:
        """Forget a flow without requests, unless it is in debt; with the last flow all debts are forgotten."""
        if account.running or len(account.line):
            return
        if not self.waiting and not self._running:
            self._accounts.clear()
            self._debtors = IndexedHeap()
            self._virtual_time = 0.0
        elif account.counter <= self._virtual_time:
            del self._accounts[account.flow]
        else:
            account.since = next(self._numbers)
            self._debtors.push(account, (account.counter, account.since))
