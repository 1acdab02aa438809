"""Rules of the protocol, registered by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zmqengine.conformance.front_end import FrontEnd

Make = Callable[[], FrontEnd]
"""Makes another front-end of the same worker, closed after the rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its chapter of SPEC.md, its text, and the function that tries it."""

    chapter: str
    says: str
    attempt: Callable[[Make], None]


RULES: list[Rule] = []


def rule(chapter: str, says: str) -> Callable[[Callable[[Make], None]], Callable[[Make], None]]:
    """Register a function as the trial of a rule."""

    def add(attempt: Callable[[Make], None]) -> Callable[[Make], None]:
        RULES.append(Rule(chapter, says, attempt))
        return attempt

    return add
