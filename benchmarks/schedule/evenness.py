"""Fairness of service among waiting front-ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from zmqengine.worker.requests.ticket import PriorityClass, Ticket

Account = tuple[str, PriorityClass]


def jain(values: Sequence[float]) -> float:
    """Jain's index, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


class Evenness:
    """Jain's index over the cost served, by class and window, of front-ends with work waiting throughout it.

    Others ask for less than their share, so they are not compared.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ends_s = window_s
        self._waiting: Counter[Account] = Counter()
        self._backlogged: set[Account] = set()
        self._served: defaultdict[Account, float] = defaultdict(float)
        self._indices: list[tuple[int, float]] = []

    def joined(self, ticket: Ticket) -> None:
        """A request of this front-end waits."""
        self._waiting[_account(ticket)] += 1

    def left(self, ticket: Ticket) -> None:
        """A request of this front-end waits no more."""
        account = _account(ticket)
        self._waiting[account] -= 1
        if not self._waiting[account]:
            del self._waiting[account]
            self._backlogged.discard(account)

    def served(self, ticket: Ticket, cost: float) -> None:
        """A request was served."""
        self._served[_account(ticket)] += cost / ticket.weight

    def look(self, now_s: float) -> None:
        """Close the window if it has ended."""
        if now_s < self._ends_s:
            return
        for kind in PriorityClass:
            costs = [self._served[account] for account in self._backlogged if account[1] is kind]
            if len(costs) > 1:
                self._indices.append((len(costs), jain(costs)))
        self._ends_s = now_s + self._window_s
        self._backlogged = set(self._waiting)
        self._served.clear()

    def index(self) -> float | None:
        """The mean over windows and classes, weighted by the number compared; None if there never were two."""
        compared = sum(number for number, _ in self._indices)
        return sum(number * value for number, value in self._indices) / compared if compared else None


def _account(ticket: Ticket) -> Account:
    return ticket.flow, ticket.priority_class
