"""What a rule is, and the list that the files beside this one add theirs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zmqengine.conformance.front_end import FrontEnd

Make = Callable[[], FrontEnd]
"""Gives another front-end of the same worker; it is closed after the rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: the chapter of SPEC.md it is from, what it says, and how it is tried."""

    chapter: str
    says: str
    attempt: Callable[[Make], None]


RULES: list[Rule] = []


def rule(chapter: str, says: str) -> Callable[[Callable[[Make], None]], Callable[[Make], None]]:
    """Add a function to the list."""

    def add(attempt: Callable[[Make], None]) -> Callable[[Make], None]:
        RULES.append(Rule(chapter, says, attempt))
        return attempt

    return add
