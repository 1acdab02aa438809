"""A batch without an engine: rows that read a prompt in one pass and make a token in each further one."""

from __future__ import annotations

from collections import Counter
from itertools import count

from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import ServiceOrder


class Serving:
    """`rows` requests run at once; flows that saturate always have two more waiting than rows there are."""

    def __init__(self, *, rows: int) -> None:
        self.order = ServiceOrder(queue_max=10_000)
        self.cost: Counter[str] = Counter()
        self._rows = rows
        self._running: dict[Ticket, int] = {}
        self._fresh: set[Ticket] = set()
        self._saturating: dict[str, tuple[float, int, int]] = {}
        self._starts: Counter[str] = Counter()
        self._starts_at: dict[Ticket, int] = {}
        self._arrivals = count()
        self._passes = 0

    def insert(self, flow: str, *, prompt: int, output: int, weight: float = 1.0) -> None:
        """One request."""
        one = Ticket(flow, weight, 0, prompt, output, next(self._arrivals), 0.0)
        self.order.enqueue(one, self._passes * 0.01)
        self._starts_at[one] = self._starts_of_others(flow)

    def saturate(self, flow: str, *, prompt: int, output: int, weight: float = 1.0) -> None:
        """From now on this flow has requests waiting at all times."""
        self._saturating[flow] = (weight, prompt, output)

    def run(self, *, passes: int) -> None:
        for _ in range(passes):
            self.run_pass()

    def run_pass(self) -> list[tuple[str, int]]:
        """Start what finds a row, serve all; (flow, starts of others while it waited) of what was started."""
        self._passes += 1
        for flow, (weight, prompt, output) in self._saturating.items():
            while self.order.places_of(flow) < self._rows + 2:
                self.insert(flow, prompt=prompt, output=output, weight=weight)
        begun = []
        now_s = self._passes * 0.01
        freed = self._rows - len(self._running)
        for _ in range(freed):
            first = self.order.first(now_s)
            if first is None:
                break
            self.order.start(first, now_s)
            begun.append((first.flow, self._starts_of_others(first.flow) - self._starts_at.pop(first)))
            self._starts[first.flow] += 1
            self._running[first] = 0
            self._fresh.add(first)
        for row in list(self._running):
            self._serve(row)
        return begun

    def jain(self) -> float:
        """(sum x)^2 / (n sum x^2) over the cost served of each flow; 1 is perfectly even."""
        costs = list(self.cost.values())
        return sum(costs) ** 2 / (len(costs) * sum(cost * cost for cost in costs))

    def _starts_of_others(self, flow: str) -> int:
        return self._starts.total() - self._starts[flow]

    def _serve(self, row: Ticket) -> None:
        if row in self._fresh:
            self._fresh.remove(row)
            self.order.charge(row, row.prompt_tokens, 0)
            self.cost[row.flow] += row.prompt_tokens * self.order.prefill_cost  # type: ignore[assignment]
        else:
            self.order.charge(row, 0, 1)
            self._running[row] += 1
            self.cost[row.flow] += 1
        if self._running[row] == row.max_tokens:
            del self._running[row]
            self.order.withdraw(row)
