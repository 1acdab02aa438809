"""`python -m benchmarks.families`: chats with a model of each family, ours beside `mlx_lm.server` and vllm-mlx.

Four users send the same requests to each server, one after another, without pauses. A server is started anew for each
round, alone, and their order turns round by round. All times are processor time of the server's processes, so that
other work on the machine does not count: a second in which two threads compute is two. `--wall` measures the time that
passes. vllm-mlx takes part if it is on $PATH.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec

from zmqengine.bench import stoppable
from zmqengine.bench.load.loops import collector_off, records_of
from zmqengine.bench.load.measures import summarise
from zmqengine.bench.load.prompts import Prompts, prompts_for, vocabulary_of_file
from zmqengine.bench.models.random_model import model_directory_of
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, ModelFacts, Rounds, TargetFacts, load, save
from zmqengine.bench.reports.target_facts import target_facts
from zmqengine.bench.scenarios.chat import conversation
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.http_target import HttpSession
from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.server_usage import ServerUsage
from zmqengine.bench.targets.target import TargetSpec
from zmqengine.cli.commands.bench import show_progress

Progress = Callable[[str], None]

FAMILIES = {
    "Llama": "25m",
    "Qwen3": "qwen3-25m",
    "Qwen3.5": "qwen3.5-25m",
    "Gemma 3": "gemma3-25m",
    "Gemma 4": "gemma4-25m",
    "gpt_oss": "gpt-oss-25m",
    "GLM-4.5": "glm4-25m",
    "LFM2": "lfm2-25m",
}
"""Shapes by name."""
USERS = 4
OURS = "zmqengine http"


def starts() -> dict[str, StartPlan]:
    """The options that start each server, without a model."""
    plans = {
        OURS: StartPlan(model="", worker=False, http=1),
        "mlx_lm.server": StartPlan(model="", worker=False, mlx_lm=True),
    }
    if shutil.which("vllm-mlx"):
        plans["vllm-mlx"] = StartPlan(model="", worker=False, vllm_mlx=True)
    return plans


class Work(msgspec.Struct, frozen=True):
    """The requests of a round: `requests` of each user, with the sizes of the scenario `chat`."""

    requests: int
    options: ScenarioOptions = ScenarioOptions()
    wall: bool = False
    timeout_s: float = 3600.0

    def of_round(self, prompts: Prompts, number: int) -> list[list[RequestSpec]]:
        """The requests of each user."""
        shared = prompts.text(self.options.chat_shared_tokens)
        return [
            list(
                islice(
                    conversation(self.options, random.Random(f"{number} {user}"), prompts, shared),
                    self.requests,
                )
            )
            for user in range(USERS)
        ]


def measure(
    families: Sequence[str], models: Path, work: Work, rounds: int, on_progress: Progress
) -> BenchReport:
    """A report with a scenario for each family."""
    setting, plans = machine.setting(), starts()
    cells, facts = [], {}
    for family in families:
        directory = model_directory_of(FAMILIES[family], models)
        prompts = prompts_for(vocabulary_of_file(directory / "tokenizer.json"), "families")
        for number in range(rounds):
            requests = work.of_round(prompts, number)
            for label in sorted(plans, reverse=number % 2 == 1):
                on_progress(f"{family}, {label}, round {number + 1} of {rounds}")
                plan = msgspec.structs.replace(plans[label], model=str(directory))
                records, facts[label] = stoppable.run(_chats(plan, requests, work, prompts))
                failures = [record.error for record in records if record.error]
                cells.append(
                    Cell(
                        scenario=family,
                        case=str(USERS),
                        target=label,
                        round=number,
                        measures=summarise(records),
                        failures={error: failures.count(error) for error in failures},
                    )
                )
    return BenchReport(
        kind="families",
        model=ModelFacts(name="25m of each family", random_weights=True, dtype="float32"),
        options={**msgspec.to_builtins(work), "rounds": rounds},
        base=OURS,
        targets=[facts[label] for label in plans],
        cells=cells,
        **setting,
    )


async def _chats(
    plan: StartPlan, requests: Sequence[Sequence[RequestSpec]], work: Work, prompts: Prompts
) -> tuple[list[RequestRecord], TargetFacts]:
    """Records of all requests, by the chosen clock."""
    async with started(plan) as [target]:
        clock = time.perf_counter if work.wall else _processor_time(target)
        session = HttpSession(target, timeout_s=work.timeout_s, clock=clock)

        async def one_user(own: Sequence[RequestSpec]) -> list[RequestRecord]:
            outcomes = [await session.send(request).outcome() for request in own]
            return records_of(outcomes, prompts.count_tokens)

        try:
            # A server compiles kernels at its first request, which is not measured.
            await one_user([prompts.request(32, 8)])
            with collector_off():
                records = await asyncio.gather(*map(one_user, requests))
            return [record for of_user in records for record in of_user], await target_facts(target)
        finally:
            await session.close()


def _processor_time(target: TargetSpec) -> Callable[[], float]:
    usage = ServerUsage(target.pids)

    def clock() -> float:
        return usage.cpu_s() or 0.0

    return clock


def with_others(report: BenchReport, earlier: BenchReport) -> BenchReport:
    """The report with what an earlier one has of other families, all in one order."""
    cells = [cell for cell in earlier.cells if cell.scenario not in report.scenarios()] + report.cells
    return msgspec.structs.replace(
        report, cells=sorted(cells, key=lambda cell: list(FAMILIES).index(cell.scenario))
    )


def table(report: BenchReport) -> list[str]:
    """A line of Markdown for each family: figures, and ours over the better of the others, round by round."""
    others = [label for label in report.labels() if label != OURS]
    labels = ", ".join([OURS, *others])
    lines = [
        f"| family | tokens/s: {labels} | to the better | TTFT p99 (ms), likewise | to the shorter |",
        "|---|---:|---:|---:|---:|",
    ]
    for family in report.scenarios():
        cells = [
            family,
            _figures(report, family, "tokens_per_s"),
            _ratio(report, family, "tokens_per_s", max),
        ]
        cells += [_figures(report, family, "ttft_p99_ms"), _ratio(report, family, "ttft_p99_ms", min)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(report: BenchReport, family: str, measure: str) -> str:
    figures = [Rounds(report).figure(family, str(USERS), label, measure) for label in report.labels()]
    return ", ".join("-" if figure is None else f"{figure.median:,.0f}" for figure in figures)


def _ratio(report: BenchReport, family: str, measure: str, better: Callable[[list[float]], float]) -> str:
    values: dict[int, dict[str, float]] = {}
    for cell in report.cells:
        if cell.scenario == family and measure in cell.measures:
            values.setdefault(cell.round, {})[cell.target] = cell.measures[measure]
    ratios = [
        of_round[OURS] / better([value for label, value in of_round.items() if label != OURS])
        for of_round in values.values()
        if OURS in of_round and len(of_round) > 1
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


@click.command()
@click.option(
    "--family", "families", multiple=True, type=click.Choice(tuple(FAMILIES)), help="[default: all]"
)
@click.option("--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the models here.")
@click.option("--rounds", default=2, show_default=True)
@click.option("--requests", default=3, show_default=True, help="Of each user in a round.")
@click.option("--wall", is_flag=True, help="Measure the time that passes.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report here, as JSON. Families that it has and that are not measured stay.",
)
def main(
    families: tuple[str, ...], models: Path | None, rounds: int, requests: int, wall: bool, out: Path | None
) -> None:
    """Chats of four users with a model of each family, on each server."""
    with TemporaryDirectory(prefix="zmqengine-bench-models-") as scratch:
        work = Work(requests, wall=wall)
        report = measure(families or tuple(FAMILIES), models or Path(scratch), work, rounds, show_progress)
    if out:
        if out.is_file():
            report = with_others(report, load(out))
        save(report, out)
    click.echo("\n".join(table(report)))


if __name__ == "__main__":
    main()
