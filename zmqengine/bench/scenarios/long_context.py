"""Scenarios, and the context in which they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from zmqengine.bench.load.loops import records_of
from zmqengine.bench.load.measures import Measures
from zmqengine.bench.load.prompts import Prompts
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.targets.records import RequestRecord
from zmqengine.bench.targets.server_usage import ServerUsage
from zmqengine.bench.targets.target import TargetOutcome, TargetSession, TargetSpec


@dataclass(frozen=True)
class Context:
    """One target and the work of one round. `partner` is the second of two targets that run together.

    `seed` differs between targets, or a server behind two of them would find their prompts in its prefix cache;
    `shared_seed` is for values that all targets of a round share, such as arrival times.
    """

    target: TargetSpec
    session: TargetSession
    prompts: Prompts
    options: ScenarioOptions
    usage: ServerUsage
    seed: str
    shared_seed: str
    partner: Context | None = None
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests, counted by reason."""

    def records(self, outcomes: Sequence[TargetOutcome]) -> list[RequestRecord]:
        """Records of outcomes, with failures noted."""
        return self.noted(records_of(outcomes, self.prompts.count_tokens))

    def noted(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Note the failures in records, and return them."""
        self.failures.update(record.error for record in records if record.error)
        return records


Run = Callable[[Context, str], Awaitable[Measures]]


@dataclass(frozen=True)
class Scenario:
    """A named workload: its cases, and the function that runs one case against one target.

    `shown` are the measures of a short table, the most important first. `pairs`: it needs two targets.
    """

    name: str
    cases: Callable[[ScenarioOptions], Sequence[str]]
    run: Run
    shown: tuple[str, ...]
    pairs: bool = False
