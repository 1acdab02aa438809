"""What a scenario is given, and what a scenario is."""

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

    `seed` differs from target to target, or a server behind two of them would find its prompts in its cache;
    `shared_seed` is for what must be the same for all targets of a round, such as times.
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
    """Why requests failed, and how many of them."""

    def records(self, outcomes: Sequence[TargetOutcome]) -> list[RequestRecord]:
        """Read outcomes apart, and note why some failed."""
        return self.noted(records_of(outcomes, self.prompts.count_tokens))

    def noted(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """The same records, their failures noted."""
        self.failures.update(record.error for record in records if record.error)
        return records


Run = Callable[[Context, str], Awaitable[Measures]]


@dataclass(frozen=True)
class Scenario:
    """A named piece of work: its cases, and how one of them is run against one target.

    `shown` are the measures of a short table, the most telling first. `pairs` is whether it needs two targets.
    """

    name: str
    summary: str
    cases: Callable[[ScenarioOptions], Sequence[str]]
    run: Run
    shown: tuple[str, ...]
    pairs: bool = False
