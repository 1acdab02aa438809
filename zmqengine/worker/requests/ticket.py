"""One request as the order of service sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class PriorityClass(IntEnum):
    """Priority class by the sign of a wire priority; the lower goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        """Below 0 somebody looks on, above 0 nobody does."""
        return cls.INTERACTIVE if priority < 0 else cls.BATCH if priority > 0 else cls.NORMAL


@dataclass(eq=False, slots=True)
class Ticket:
    """One request as the order of service sees it. What follows `deadline_s` is kept by `ServiceOrder`.

    `flow` names whom it is charged to, `weight` is that flow's share (> 0), `priority` the number on the wire,
    `arrival` a number that grows from request to request. Cost is in made tokens: one is 1, one read is
    `ServiceOrder.prefill_cost`.
    """

    flow: str
    weight: float
    priority: int
    prompt_tokens: int
    max_tokens: int | None
    arrival: int
    waiting_since_s: float
    deadline_s: float | None = None
    phase: Literal["new", "waiting", "running", "gone"] = "new"
    served_cost: float = 0.0
    prepaid_cost: float = 0.0
    running_class: PriorityClass = PriorityClass.BATCH
    """While it runs: the class it counts as when somebody has to make room."""
    has_started: bool = False

    @property
    def priority_class(self) -> PriorityClass:
        """The class it waits in."""
        return PriorityClass.of(self.priority)
