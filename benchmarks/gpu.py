"""`python -m benchmarks.gpu`: throughput and latency on a GPU, one model after the other.

For each model: the worker, an HTTP front-end and `mlx_lm.server` against mlx-lm's own generator on the same work; the
first requests after the start; a long prompt beside streams. Models have random weights of common shapes. Each run
writes `gpu-MODEL.json`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from benchmarks.bare_process import BareProcess
from benchmarks.overhead import BARE, OverheadOptions, OverheadRunner, group
from zmqengine.bench import stoppable
from zmqengine.bench.load.measures import Measures, ttft_ms
from zmqengine.bench.load.prompts import Prompts, prompts_for, vocabulary_of_file
from zmqengine.bench.models.model_facts import model_facts
from zmqengine.bench.models.random_model import model_directory_of
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, TargetFacts, save
from zmqengine.bench.reports.target_facts import target_facts
from zmqengine.bench.rounds import Runner
from zmqengine.bench.scenarios import scenario_named
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session
from zmqengine.cli.commands.bench import finish, seed_option, show_progress

Progress = Callable[[str], None]

FIRST_REQUESTS = 10
RESTS_S = (1.0,) * 5 + (6.0,) * 2
"""Idle times before later requests. In the longer ones a worker releases its spare buffers."""


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run on the model in a directory. Every server and the generator have `slots` rows."""

    model: str
    mlx_lm: bool = True
    slots: int = 64
    streams: tuple[int, ...] = (1, 8, 32, 64)
    requests_per_stream: int = 3
    rounds: int = 1
    seed: int = 0


async def measure_on_gpu(
    plan: GpuPlan, on_progress: Progress, keep: Callable[[BenchReport], None]
) -> BenchReport:
    """Start all servers, measure, end them. Raises TargetError.

    `keep` is called with the report so far after each part, so that an interrupted run leaves one.
    """
    setting, model = machine.setting(), model_facts(plan.model)
    directory = Path(plan.model)
    on_progress(f"{directory.name}: starting the generator and the servers")
    cells: list[Cell] = []
    described: list[TargetFacts] = []

    def report() -> BenchReport:
        return BenchReport(
            kind="gpu",
            model=model,
            options={**msgspec.to_builtins(plan), "model": directory.name},
            base=BARE,
            targets=described,
            cells=cells,
            **setting,
        )

    waiting = asyncio.create_task(BareProcess.start(directory, rows=plan.slots))
    try:
        servers = StartPlan(model=plan.model, http=1, mlx_lm=plan.mlx_lm, slots=plan.slots)
        async with started(servers) as targets:
            bare = await waiting
            described += await _describe(targets, bare)
            async for figures in _beside(plan, targets, bare, on_progress):
                cells += figures
                keep(report())
    finally:
        await _end(waiting)
    return report()


async def _describe(targets: list[TargetSpec], bare: BareProcess) -> list[TargetFacts]:
    described = [TargetFacts(label=BARE, kind="in process", server="mlx-lm", facts={"blas": bare.blas})]
    for label, members in group(targets).items():
        described.append(msgspec.structs.replace(await target_facts(members[0]), label=label))
    return described


async def _beside(
    plan: GpuPlan, targets: list[TargetSpec], bare: BareProcess, on_progress: Progress
) -> AsyncIterator[list[Cell]]:
    """Cells of one part after the other."""
    name = Path(plan.model).name

    def tell(text: str) -> None:
        on_progress(f"{name}: {text}")

    prompts = prompts_for(vocabulary_of_file(Path(plan.model) / "tokenizer.json"), str(plan.seed))
    tell("the first requests")
    yield [await first_requests(targets[0], prompts)]
    options = OverheadOptions(
        streams=plan.streams,
        requests_min=10,
        requests_per_stream=plan.requests_per_stream,
        idle_s=1.0,
        timeout_s=180.0,
    )
    runner = OverheadRunner(bare, group(targets), prompts, options, seed=plan.seed, on_progress=tell)
    async for cells in runner.parts(plan.rounds):
        yield cells
    long = Runner(
        [target for target in targets if target.kind == "worker" or not target.worker],
        prompts,
        ScenarioOptions(interference_stream_tokens=1024),
        seed=plan.seed,
        on_progress=tell,
    )
    # Twice: the second round finds warm caches, as later long prompts do.
    yield await long.run(scenario_named("interference"), 2)


async def _end(waiting: asyncio.Task[BareProcess]) -> None:
    try:
        bare = await waiting
    except TargetError:
        return
    await bare.end()


async def first_requests(worker: TargetSpec, prompts: Prompts) -> Cell:
    """Times to the first token of a worker's first requests, in sequence, and of later ones after idle times.

    An idle machine is slower at first, so a cold start costs the difference between the first request and a later one
    after an idle time. The clock of the GPU, which falls when it is idle, is reported too.
    """
    cell = Cell(scenario="first", case=f"{FIRST_REQUESTS} requests in turn", target=worker.label, round=0)
    session = await open_session(worker, timeout_s=180.0)
    clocks = {"clock_before_mhz": await machine.gpu_clock_mhz()}
    try:
        times: list[float] = []
        for number, rest_s in enumerate((RESTS_S[0], *(0.0,) * (FIRST_REQUESTS - 1), *RESTS_S)):
            if number == FIRST_REQUESTS:
                clocks["clock_tenth_mhz"] = await machine.gpu_clock_mhz()
            await asyncio.sleep(rest_s)
            outcome = await session.send(prompts.request(60 + number, 16)).outcome()
            ttft = ttft_ms(outcome.record(None))
            if ttft is None:
                return msgspec.structs.replace(cell, error="a request had no token")
            times.append(ttft)
    finally:
        await session.close()
    in_turn = times[:FIRST_REQUESTS]
    after: dict[float, list[float]] = {rest_s: [] for rest_s in RESTS_S}
    for rest_s, time_ms in zip(RESTS_S, times[FIRST_REQUESTS:], strict=True):
        after[rest_s].append(time_ms)
    measures: Measures = {
        "ttft_first_ms": in_turn[0],
        "ttft_tenth_ms": in_turn[-1],
        "ttft_median_ms": median(in_turn),
        "ttft_rested_ms": median(after[min(RESTS_S)]),
        "ttft_idle_ms": median(after[max(RESTS_S)]),
        **{name: mhz for name, mhz in clocks.items() if mhz is not None},
    }
    return msgspec.structs.replace(cell, measures=measures)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmarks"), show_default=True
)
@click.option(
    "--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the random models here."
)
@click.option(
    "--model", "names", multiple=True, default=("8b", "8b-4bit", "0.5b"), show_default=True, metavar="NAME"
)
@click.option("--mlx-lm/--no-mlx-lm", default=True, show_default=True, help="Also through mlx_lm.server.")
@click.option(
    "--streams", "streams", type=int, multiple=True, default=(1, 8, 32, 64), show_default=True, metavar="N"
)
@click.option("--requests", "requests_per_stream", default=3, show_default=True, help="For each stream.")
@click.option("--rounds", default=1, show_default=True)
@seed_option
@click.option("--quick", is_flag=True, help="Few streams and requests, to see that everything works.")
def main(out: Path, models: Path | None, names: tuple[str, ...], quick: bool, **others: Any) -> None:
    """Measure a GPU: throughput against the bare generator, first requests, long prompts.

    About three minutes for each model. The 8B shape needs 40 GB on the device.
    """
    less: dict[str, Any] = {"streams": (1, 2), "slots": 2, "requests_per_stream": 2} if quick else {}
    with tempfile.TemporaryDirectory(prefix="zmqengine-bench-models-") as scratch:
        for name in names:
            directory = model_directory_of(name, models or Path(scratch))
            plan = GpuPlan(model=str(directory), **{**others, **less})
            keep = partial(save, path=out / f"gpu-{name}.json")
            finish(stoppable.run(measure_on_gpu(plan, show_progress, keep)), None, None, False)


if __name__ == "__main__":
    main()
