"""Interleaved rounds over several targets, so that drifting machine speed affects all alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from zmqengine.bench.load.measures import Measures
from zmqengine.bench.load.prompts import Prompts
from zmqengine.bench.load.worker_numbers import WorkerNumbers, figures
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.reports.report import Cell
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.server_usage import ServerUsage
from zmqengine.bench.targets.target import TargetError, TargetSession, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session

Progress = Callable[[str], None]
WARM_UP_REQUESTS = 4
SECOND = " (second)"
"""Suffix of the label of a target's partner, which is used in `two-models` only."""


class Runner:
    """Runs cases against targets, each measurement on its own session."""

    def __init__(
        self,
        targets: Sequence[TargetSpec],
        prompts: Prompts,
        options: ScenarioOptions,
        *,
        seed: int,
        on_progress: Progress,
    ) -> None:
        self._targets = targets
        self._prompts = prompts
        self._options = options
        self._seed = seed
        self._on_progress = on_progress

    async def warm_up(self) -> None:
        """Send a few requests to each target, one alone and some together, that are not measured."""
        for target in self._targets:
            self._on_progress(f"warming up {target.label}")
            context = await self._context(target, "warm-up", 0)
            try:
                for together in (1, WARM_UP_REQUESTS):
                    streams = [context.session.send(context.prompts.request(32, 8)) for _ in range(together)]
                    records = context.records([await stream.outcome() for stream in streams])
                    if failed := next((record.error for record in records if record.error), ""):
                        raise TargetError(f"{target.label}: {failed}")
            finally:
                await context.session.close()

    async def run(self, scenario: Scenario, rounds: int) -> list[Cell]:
        """Cells of every case, targets interleaved: A B C, A B C, ... A failing target is noted; the others go on."""
        cells = []
        for case in scenario.cases(self._options):
            for number in range(rounds):
                for targets in self._turns(scenario):
                    label = " and ".join(target.label for target in targets)
                    self._on_progress(f"{scenario.name}: {case}, {label}, round {number + 1} of {rounds}")
                    cells.append(await self._cell(scenario, case, targets, number))
        return cells

    def _turns(self, scenario: Scenario) -> list[tuple[TargetSpec, ...]]:
        by_label = {target.label: target for target in self._targets}
        pairs = [
            (by_label[label.removesuffix(SECOND)], target)
            for label, target in by_label.items()
            if label.endswith(SECOND) and label.removesuffix(SECOND) in by_label
        ]
        if scenario.pairs:
            return [*pairs] or [tuple(self._targets[:2])]
        seconds = {second.label for _, second in pairs}
        return [(target,) for target in self._targets if target.label not in seconds]

    async def _cell(self, scenario: Scenario, case: str, targets: Sequence[TargetSpec], number: int) -> Cell:
        cell = Cell(scenario=scenario.name, case=case, target=targets[0].label, round=number)
        sessions: list[TargetSession] = []
        try:
            context = None
            for target in reversed(targets):
                context = await self._context(target, f"{scenario.name} {case}", number, context)
                sessions.append(context.session)
            assert context is not None
            measures = await measure(context, scenario, case)
            return msgspec.structs.replace(cell, measures=measures, failures=dict(context.failures))
        except TargetError as error:
            self._on_progress(f"{scenario.name}: {case}: {error}")
            return msgspec.structs.replace(cell, error=str(error))
        finally:
            for session in sessions:
                await session.close()

    async def _context(
        self, target: TargetSpec, work: str, number: int, partner: Context | None = None
    ) -> Context:
        shared_seed = f"{self._seed} {work} {number}"
        seed = f"{shared_seed} {target.label}"
        return Context(
            target=target,
            session=await open_session(target, timeout_s=self._options.timeout_s),
            prompts=self._prompts.reseeded(seed),
            options=self._options,
            usage=ServerUsage(target.pids),
            seed=seed,
            shared_seed=shared_seed,
            partner=partner,
        )


async def measure(context: Context, scenario: Scenario, case: str) -> Measures:
    """Figures of one case on one target, with CPU time and memory of the server and CPU time of the load."""
    numbers = WorkerNumbers(context.target.worker) if context.target.worker else None
    try:
        passes_before = await numbers.read() if numbers else {}
        server_before_s, load_before_s, started_s = context.usage.cpu_s(), _own_cpu_s(), time.perf_counter()
        measures = await scenario.run(context, case)
        elapsed_s = time.perf_counter() - started_s
        server_after_s = context.usage.cpu_s()
        measures = {"client_cpu_cores": (_own_cpu_s() - load_before_s) / elapsed_s, **measures}
        if server_before_s is not None and server_after_s is not None:
            server_s = server_after_s - server_before_s
            measures["server_cpu_cores"] = server_s / elapsed_s
            if measures.get("tokens"):
                measures["server_cpu_per_token_us"] = server_s * 1e6 / measures["tokens"]
        memory = context.usage.memory_bytes()
        if memory is not None:
            measures["server_memory_bytes"] = memory
        if numbers:
            measures |= figures(passes_before, await numbers.read())
        return measures
    finally:
        if numbers:
            await numbers.close()


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
