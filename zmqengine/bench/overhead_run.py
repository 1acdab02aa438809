"""`bench overhead` from a model to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from zmqengine.bench import machine
from zmqengine.bench.bare_process import BareProcess
from zmqengine.bench.model_facts import model_directory, model_facts
from zmqengine.bench.overhead import BARE, OverheadRunner
from zmqengine.bench.overhead_options import OverheadOptions
from zmqengine.bench.prompts import prompts_for, vocabulary_of_file
from zmqengine.bench.report import Report, TargetFacts
from zmqengine.bench.servers import StartPlan, started
from zmqengine.bench.target_facts import target_facts
from zmqengine.bench.targets import TargetSpec

Progress = Callable[[str], None]


class OverheadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: our worker on `model`, `http` front-ends of ours and `mlx_lm.server` if they are asked for."""

    model: str
    http: int = 0
    mlx_lm: bool = False
    options: OverheadOptions = OverheadOptions()
    rounds: int = 5
    seed: int = 0


async def overhead(plan: OverheadPlan, on_progress: Progress) -> Report:
    """Start everything, measure round by round, end everything. Raises TargetError."""
    setting = machine.setting()
    directory = model_directory(plan.model)
    model = str(directory)
    on_progress("starting the generator and the servers")
    bare = await BareProcess.start(directory)
    try:
        async with started(StartPlan(model=model, http=plan.http, mlx_lm=plan.mlx_lm)) as targets:
            groups = group(targets)
            prompts = prompts_for(vocabulary_of_file(directory / "tokenizer.json"), str(plan.seed))
            runner = OverheadRunner(
                bare, groups, prompts, plan.options, seed=plan.seed, on_progress=on_progress
            )
            cells = await runner.run(plan.rounds)
            labelled = [
                msgspec.structs.replace(await target_facts(members[0]), label=label)
                for label, members in groups.items()
            ]
            generator = TargetFacts(label=BARE, kind="in process", server="mlx-lm", facts={"blas": bare.blas})
            return Report(
                kind="overhead",
                model=model_facts(plan.model),
                options={**msgspec.to_builtins(plan.options), "rounds": plan.rounds, "seed": plan.seed},
                base=BARE,
                targets=[generator, *labelled],
                cells=cells,
                **setting,
            )
    finally:
        await bare.end()


def group(targets: Sequence[TargetSpec]) -> dict[str, Sequence[TargetSpec]]:
    """The worker first; then one HTTP front-end, and all of them together; then the others."""
    ours = [target for target in targets if target.kind == "http" and target.worker]
    groups: dict[str, Sequence[TargetSpec]] = {t.label: [t] for t in targets if t.kind == "worker"}
    groups |= {target.label: [target] for target in ours[:1]}
    if len(ours) > 1:
        groups[f"{ours[0].label} x{len(ours)}"] = ours
    return groups | {t.label: [t] for t in targets if t.kind == "http" and not t.worker}
