"""Ticket: the scheduling facts of one request, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class PriorityClass(IntEnum):
    """Priority class, by the sign of the priority on the wire; the lower goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        """The class of a priority: below 0 a user watches, above 0 the work is not urgent."""
        return cls.INTERACTIVE if priority < 0 else cls.BATCH if priority > 0 else cls.NORMAL


@dataclass(eq=False, slots=True)
class Ticket:
    """Scheduling facts of a request; the fields from `phase` on belong to `ServiceOrder`.

    `flow` is the account it is charged to, `weight` that flow's share (> 0), `priority` the number on the wire,
    `arrival` a number that grows from request to request. The unit of cost is one decoded token; a prefilled token
    costs `ServiceOrder.prefill_cost`.
    """

    flow: str
    weight: float
    priority: int
    prompt_tokens: int
    max_tokens: int | None
    arrival: int
    waiting_since_s: float
    deadline_s: float | None = None
    phase: Literal["new", "admitted", "waiting", "running", "gone"] = "new"
    prepaid_cost: float = 0.0
    running_class: PriorityClass = PriorityClass.BATCH
    """The class it counts as while it runs, when a row has to be preempted."""
    has_started: bool = False

    @property
    def priority_class(self) -> PriorityClass:
        """The class whose queue it waits in."""
        return PriorityClass.of(self.priority)
