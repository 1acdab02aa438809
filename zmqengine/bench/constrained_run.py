"""`bench constrained` from shapes of models to a report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from zmqengine.bench import machine
from zmqengine.bench.constrained import FREE, NEW, SEEN, ConstrainedOptions, ConstrainedRunner, json_mode
from zmqengine.bench.model_facts import CARD, model_facts
from zmqengine.bench.model_shapes import SHAPES
from zmqengine.bench.prompts import prompts_for, vocabulary_of_file
from zmqengine.bench.random_model import make_model
from zmqengine.bench.report import Cell, Report, TargetFacts
from zmqengine.bench.servers import StartPlan, started
from zmqengine.bench.target_facts import target_facts
from zmqengine.bench.targets import TargetSpec

Progress = Callable[[str], None]


class ConstrainedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a worker of each of the shapes in turn. `peers` serve the first over HTTP, as `http` of ours does."""

    shapes: tuple[str, ...]
    models: str = ""
    http: bool = False
    peers: tuple[TargetSpec, ...] = ()
    options: ConstrainedOptions = ConstrainedOptions()
    rounds: int = 5
    seed: int = 0


async def constrained(plan: ConstrainedPlan, on_progress: Progress) -> Report:
    """Make the models, measure one after the other, end everything. Raises TargetError."""
    setting = machine.setting()
    cells: list[Cell] = []
    servers: list[TargetFacts] = []
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="zmqengine-bench-models-"))
        models = [_model(shape, Path(plan.models or scratch), on_progress) for shape in plan.shapes]
        for place, (shape, model) in enumerate(zip(plan.shapes, models, strict=True)):
            prompts = prompts_for(vocabulary_of_file(model / "tokenizer.json"), f"{plan.seed} {shape}")
            http = int(plan.http and place == 0)
            async with started(StartPlan(model=str(model), http=http)) as targets:
                worker = targets[0]
                if place == 0:
                    known = (await target_facts(worker)).facts
                    servers = [
                        TargetFacts(label=kind, kind="worker", facts=known) for kind in (FREE, SEEN, NEW)
                    ]
                runner = ConstrainedRunner(worker, prompts, plan.options, shape, on_progress)
                cells += await runner.run(plan.rounds)
                over_http = [*targets[1:], *plan.peers] if place == 0 else []
                for target in over_http:
                    servers.append(await target_facts(target))
                for number in range(plan.rounds if over_http else 0):
                    for target in over_http:
                        chat = msgspec.structs.replace(target, api="chat")
                        on_progress(f"{target.label}: round {number + 1} of {plan.rounds}")
                        cells += await json_mode(chat, prompts, plan.options, number)
        return Report(
            kind="constrained",
            model=model_facts(str(models[0])),
            options={**msgspec.to_builtins(plan.options), "rounds": plan.rounds, "seed": plan.seed},
            base=FREE,
            targets=servers,
            cells=cells,
            **setting,
        )


def _model(shape: str, directory: Path, on_progress: Progress) -> Path:
    path = directory / shape
    if not (path / CARD).is_file():
        on_progress(f"making a model of shape {shape}")
        make_model(shape, SHAPES[shape], path)
    return path
