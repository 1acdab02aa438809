"""Scheduling policy: which waiting request is served next, and which running row is preempted.

Fair between flows, urgent classes first. A *flow* is the account that a request is charged to: a key, or a session
without one. Between the flows of a class the order is weighted fair queueing by cost served, as in the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), which is start-time fair queueing
(Goyal et al., SIGCOMM 1996) for requests whose cost is known only once they are served. No clock, no sockets and no
MLX here: equal calls give equal answers.

The rules, each one tested:

1. A better class goes first. Ageing: once the first request of a worse class has waited `ageing_s`, or nothing of that
   class has started for that long, one of every `STARTS_PER_TURN` starts is for it. A class always gets service, and a
   deep queue does not become urgent by being deep.
2. In a class, the flow that was served least for its weight goes first. A flow that had nothing waiting starts level
   with the least served of the waiting flows: being idle earns nothing. Cost is counted for each class apart, so batch
   work done in idle hours is not held against the same flow's interactive requests.
3. In a flow and class: the lower priority number, then the earlier arrival. A preempted request keeps its arrival.
4. When memory is short, the row of the worst class is preempted, among those the youngest.
5. For another request, only a row that runs as BATCH is preempted, and only for a better class. The request that takes
   its place runs as NORMAL or INTERACTIVE and so is never preempted by this rule: no two rows preempt each other for
   ever. A row that started by ageing counts as of the class it went before, or its turn would be worth nothing.
6. A row of the same class is preempted for another flow if, even afterwards, its flow has at least twice as many rows
   for its weight as the other; below that, a preemption costs more than it evens out. Each such exchange lowers the
   sum of rows^2 / weight over the flows, so these end as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zmqengine.config import WorkerConfig
from zmqengine.worker.requests.ticket import PriorityClass, Ticket
from zmqengine.worker.scheduler.fair_queue import FairQueue

STARTS_PER_TURN = 20
"""Under ageing, one start in this number is for a worse class: it costs the better ones 5 % of theirs."""
PREFILL_COST = 0.5
"""Cost of prefilling a token relative to decoding one, until it is measured."""
_DEFAULTS = WorkerConfig()


class ServiceOrder:
    """The order of service: a fair queue for each priority class, and the accounts of running requests.

    A request takes a place with `admit`, waits in line from `enqueue` on, gets a row with `start`, goes back with
    `enqueue` when it is preempted, and leaves with `withdraw` in any phase; nothing here refers to it then. Every call
    takes O(log n), `victim` O(rows). `queue_max` bounds the places, by `may_admit`: a request has one while it has no
    row, also while it is prepared.
    """

    def __init__(self, *, queue_max: int = _DEFAULTS.queue_max, ageing_s: float = _DEFAULTS.ageing_s) -> None:
        self.prefill_cost = PREFILL_COST
        self.aged_starts = 0
        self._queue_max = queue_max
        self._ageing_s = ageing_s
        self._classes = {kind: FairQueue() for kind in PriorityClass}
        self._places_by_flow: Counter[str] = Counter()
        self.places = 0
        """Number of requests without a row, in line or not."""

    def __len__(self) -> int:
        """Number of requests in line."""
        return sum(queue.waiting for queue in self._classes.values())

    def places_of(self, flow: str) -> int:
        """Number of a flow's requests without a row, in line or not."""
        return self._places_by_flow.get(flow, 0)

    def may_admit(self, flow: str) -> bool:
        """Whether a flow may have one more request without a row: it holds fewer places than are free.

        So one flow fills half of the queue, two a third each, and there is always a place for a newcomer. This is
        the dynamic threshold of Choudhury and Hahne (IEEE/ACM Transactions on Networking 6:2, 1998).
        """
        return self.places_of(flow) < self._queue_max - self.places

    def admit(self, ticket: Ticket) -> None:
        """Give a new request a place; it is not in line before `enqueue`."""
        assert ticket.phase == "new", f"a {ticket.phase} request has been admitted before"
        ticket.phase = "admitted"
        self._take_place(ticket.flow)

    def enqueue(self, ticket: Ticket, now_s: float) -> None:
        """Queue a request, or a preempted one again: ahead of its flow's later arrivals."""
        assert ticket.phase in ("new", "admitted", "running"), (
            f"a {ticket.phase} request cannot be put in line"
        )
        queue = self._classes[ticket.priority_class]
        if ticket.phase == "running":
            queue.stop(ticket)
        if ticket.phase != "admitted":
            self._take_place(ticket.flow)
        ticket.phase = "waiting"
        ticket.waiting_since_s = now_s
        queue.push(ticket, now_s)

    def set_aside(self, ticket: Ticket) -> None:
        """Take a waiting request out of the line; it keeps its place until `enqueue`."""
        assert ticket.phase == "waiting", f"a {ticket.phase} request is not in line"
        self._classes[ticket.priority_class].remove(ticket)
        ticket.phase = "admitted"

    def first(self, now_s: float) -> Ticket | None:
        """The waiting request to serve next. Changes nothing."""
        queue = self._next_queue(now_s)
        return None if queue is None else queue.first()

    def start(self, ticket: Ticket, now_s: float) -> None:
        """Give a waiting request a row. Its prompt is charged in advance, or one pass would start a whole flow."""
        assert ticket.phase == "waiting", f"a {ticket.phase} request cannot start"
        kind = ticket.priority_class
        ahead_of = [better for better in PriorityClass if better < kind and self._classes[better].waiting]
        ticket.running_class = min([kind, *ahead_of])
        self.aged_starts += bool(ahead_of)
        prepaid = 0.0 if ticket.has_started else ticket.prompt_tokens * self.prefill_cost
        self._classes[kind].start(ticket, prepaid + 1.0, now_s)
        self._forget_place(ticket.flow)
        for worse in PriorityClass:
            if worse > kind:
                self._classes[worse].passed_over += 1
        ticket.phase = "running"
        ticket.has_started = True

    def charge(self, ticket: Ticket, prefill_tokens: int, decode_tokens: int) -> None:
        """Charge a running request's flow for tokens that were prefilled and decoded.

        Exclude cached tokens, and tokens that a preempted row prefills again: the flow did not cause them.
        """
        assert ticket.phase == "running", f"a {ticket.phase} request is not served"
        cost = prefill_tokens * self.prefill_cost + decode_tokens
        self._classes[ticket.priority_class].charge(ticket, cost)

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a request that ended, in any phase; no error for one that was never admitted or was removed before."""
        if ticket.phase == "waiting":
            self._classes[ticket.priority_class].remove(ticket)
        if ticket.phase in ("admitted", "waiting"):
            self._forget_place(ticket.flow)
        if ticket.phase == "running":
            self._classes[ticket.priority_class].stop(ticket)
        ticket.phase = "gone"

    def victim(self, running: Iterable[Ticket], *, for_: Ticket | None = None) -> Ticket | None:
        """The row to preempt: of the worst class, the youngest (rule 4).

        With `for_`, only a row that this request may displace (rules 5 and 6), or None. Then start `for_` at once:
        after the preemption, `first` may name the victim's own request.
        """
        rows = list(running)
        if for_ is not None:
            held = Counter(row.flow for row in rows)
            rows = [row for row in rows if _outranks(for_, row) or _evens_out(for_, row, held)]
        return max(rows, key=lambda row: (row.running_class, row.arrival), default=None)

    def places_ahead(self, flow: str, priority: int) -> int:
        """Estimate of the requests that would start before one more request of this flow. O(1)."""
        kind = PriorityClass.of(priority)
        better = sum(self._classes[other].waiting for other in PriorityClass if other < kind)
        return better + self._classes[kind].places_ahead(flow)

    def reason(self, ticket: Ticket, now_s: float) -> str:
        """The reason for which a request waits, in a sentence for people."""
        if ticket.phase != "waiting":
            return "it runs" if ticket.phase == "running" else "it is not in line"
        if self.first(now_s) is ticket:
            return "it is next, as soon as there is a row and memory for it"
        waited = f"it has waited {max(0.0, now_s - ticket.waiting_since_s):.0f} s"
        kind = ticket.priority_class
        queue = self._classes[kind]
        if (others := queue.waiting_of(ticket.flow) - 1) and not queue.heads_flow(ticket):
            return f"{waited}: other requests of the same front-end go first ({others} wait)"
        better = sum(self._classes[other].waiting for other in PriorityClass if other < kind)
        if better:
            return (
                f"{waited}: {better} more urgent go first; after {self._ageing_s:g} s every "
                f"{STARTS_PER_TURN}th start is for {kind.name.lower()} requests"
            )
        if queue.first() is ticket:
            return f"{waited}: less urgent work has its turn first"
        return f"{waited}: front-ends that were served less go first ({queue.flows - 1} wait)"

    def _take_place(self, flow: str) -> None:
        self.places += 1
        self._places_by_flow[flow] += 1

    def _forget_place(self, flow: str) -> None:
        self.places -= 1
        self._places_by_flow[flow] -= 1
        if not self._places_by_flow[flow]:
            del self._places_by_flow[flow]

    def _next_queue(self, now_s: float) -> FairQueue | None:
        """The queue of the best class, or of a worse one whose turn has come by ageing (rule 1)."""
        filled = [queue for queue in self._classes.values() if queue.waiting]
        overdue = [
            queue
            for queue in filled[1:]
            if queue.passed_over >= STARTS_PER_TURN - 1 and now_s - queue.unserved_since_s() >= self._ageing_s
        ]
        if overdue:
            return min(overdue, key=FairQueue.unserved_since_s)
        return filled[0] if filled else None


def _outranks(ticket: Ticket, row: Ticket) -> bool:
    """Rule 5."""
    return ticket.priority_class < row.running_class == PriorityClass.BATCH


def _evens_out(ticket: Ticket, row: Ticket, held: Counter[str]) -> bool:
    """Rule 6; `held` counts the rows of each flow."""
    if row.flow == ticket.flow or not row.priority_class == row.running_class == ticket.priority_class:
        return False
    return (held[row.flow] - 1) / row.weight >= 2 * (held[ticket.flow] + 1) / ticket.weight
