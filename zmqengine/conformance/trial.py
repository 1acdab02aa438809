"""Trials of the rules on a running worker, each with its own front-end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

# Imported to register their rules.
import zmqengine.conformance.control
import zmqengine.conformance.images
import zmqengine.conformance.requests
import zmqengine.conformance.sessions
import zmqengine.conformance.vectors  # noqa: F401
from zmqengine.conformance.front_end import FrontEnd, NotApplicable, NotConforming
from zmqengine.conformance.rules import RULES, Rule


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a rule's trial. `problem` is empty if the worker conforms."""

    rule: Rule
    problem: str = ""


def check(
    address: str,
    *,
    answer_s: float = 10.0,
    prepare: Callable[[zmq.Socket[bytes]], None] | None = None,
    only: str = "",
) -> Iterator[Outcome]:
    """Try the rules that contain `only` on the worker whose ctl is at `address`, one after the other.

    `answer_s` is the time-out of a reply; `prepare` is called with every socket before it connects, to set keys.
    """
    for tried in RULES:
        if only.lower() not in f"{tried.chapter} {tried.says}".lower():
            continue
        made: list[FrontEnd] = []

        def make(made: list[FrontEnd] = made) -> FrontEnd:
            made.append(FrontEnd(address, answer_s=answer_s, prepare=prepare))
            return made[-1]

        try:
            with contextlib.suppress(NotApplicable):
                tried.attempt(make)
            yield Outcome(tried)
        except NotConforming as problem:
            yield Outcome(tried, str(problem))
        except (KeyError, IndexError, TypeError, ValueError) as malformed:
            yield Outcome(tried, f"an answer is not of its form: {type(malformed).__name__} {malformed}")
        finally:
            for front_end in made:
                front_end.close()
