"""`bench serve`: scenarios against several targets, and their report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from zmqengine.bench.load.prompts import Vocabulary, prompts_for, vocabulary_of_file
from zmqengine.bench.models.model_facts import model_directory, model_facts
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, ModelFacts
from zmqengine.bench.reports.target_facts import target_facts, vocabulary_of_worker, with_worker_pid
from zmqengine.bench.rounds import Runner
from zmqengine.bench.scenarios import scenario_named
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.target import TargetError, TargetSpec

Progress = Callable[[str], None]


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Started targets come after given ones; `base` is a label, the first target if empty."""

    scenarios: tuple[str, ...]
    targets: tuple[TargetSpec, ...] = ()
    start: StartPlan | None = None
    tokenizer: str = ""
    options: ScenarioOptions = ScenarioOptions()
    rounds: int = 3
    seed: int = 0
    base: str = ""


async def serve(plan: ServePlan, on_progress: Progress) -> BenchReport:
    """Start servers, measure, end the servers. Raises TargetError."""
    setting = machine.setting()
    # A directory without a model is told of before anything starts.
    model = model_facts(plan.start.model) if plan.start is not None and plan.start.engine == "mlx" else None
    async with AsyncExitStack() as stack:
        targets = [await with_worker_pid(target) for target in plan.targets]
        if plan.start is not None:
            on_progress("starting servers")
            targets += await stack.enter_async_context(started(plan.start))
        if not targets:
            raise TargetError("nothing to measure: give --worker, --url or --start")
        prompts = prompts_for(await _vocabulary(plan, targets), str(plan.seed))
        runner = Runner(targets, prompts, plan.options, seed=plan.seed, on_progress=on_progress)
        await runner.warm_up()
        cells: list[Cell] = []
        for name in plan.scenarios:
            if scenario_named(name).pairs and len(targets) < 2:
                on_progress(f"{name}: left out, it needs two targets")
                continue
            cells += await runner.run(scenario_named(name), plan.rounds)
        return BenchReport(
            kind="serve",
            model=model or _model(targets),
            options=_options(plan),
            base=plan.base or targets[0].label,
            targets=[await target_facts(target) for target in targets],
            cells=cells,
            **setting,
        )


async def _vocabulary(plan: ServePlan, targets: Sequence[TargetSpec]) -> Vocabulary | None:
    if plan.tokenizer:
        path = Path(plan.tokenizer)
        return vocabulary_of_file(path / "tokenizer.json" if path.is_dir() else path)
    worker = next((target.worker for target in targets if target.worker), "")
    if worker:
        return await vocabulary_of_worker(worker)
    if plan.start is not None:
        return vocabulary_of_file(model_directory(plan.start.model) / "tokenizer.json")
    return None


def _model(targets: Sequence[TargetSpec]) -> ModelFacts:
    return ModelFacts(name=next((target.model for target in targets if target.model), "not told"))


def _options(plan: ServePlan) -> dict[str, Any]:
    options: dict[str, Any] = msgspec.to_builtins(plan.options)
    return {**options, "rounds": plan.rounds, "seed": plan.seed}
