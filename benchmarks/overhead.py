"""`python -m benchmarks.overhead`: the cost that worker, wire and client add to mlx-lm's generator.

Interleaved in one run: the bare generator in a process of its own, our worker read by one client process and by
several, optionally our HTTP front-ends and `mlx_lm.server`. Same prompts and lengths, the same BLAS on one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from benchmarks.bare_process import BareProcess
from zmqengine.bench import stoppable
from zmqengine.bench.arguments import with_settings
from zmqengine.bench.load.load_process import LoadJob
from zmqengine.bench.load.loops import closed_loop, streams_in_flight
from zmqengine.bench.load.measures import Measures, spread, summarise, ttft_ms
from zmqengine.bench.load.processes import run_together
from zmqengine.bench.load.prompts import Prompts, prompts_for, vocabulary_of_file
from zmqengine.bench.load.worker_numbers import WorkerNumbers, figures
from zmqengine.bench.models.model_facts import model_directory, model_facts
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, TargetFacts
from zmqengine.bench.reports.target_facts import target_facts
from zmqengine.bench.servers.bare_generator import BareJob
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.records import RequestSpec
from zmqengine.bench.targets.server_usage import ServerUsage
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session
from zmqengine.cli.commands.bench import (
    finish,
    out_option,
    plot_option,
    ranges_option,
    seed_option,
    show_progress,
)

BARE = "bare generator"
Progress = Callable[[str], None]


class Case(NamedTuple):
    """A closed loop of `streams` over `requests`, shared by `processes` clients."""

    name: str
    streams: int
    processes: int
    requests: int
    max_tokens: int


class OverheadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes. `processes` clients share the largest number of streams, unless it is 1.

    `burst` requests are sent at once, in a case of their own; 0 leaves it out.
    """

    streams: tuple[int, ...] = (1, 8, 32)
    processes: int = 4
    prompt_tokens: int = 64
    max_tokens: int = 64
    requests_min: int = 16
    requests_per_stream: int = 8
    burst: int = 0
    burst_max_tokens: int = 16
    arrivals: int = 8
    idle_s: float = 10.0
    timeout_s: float = 120.0

    @property
    def cases(self) -> list[Case]:
        """Cases by number of streams; the largest again, shared by several clients; the burst."""
        cases = [self.case(streams, 1) for streams in self.streams]
        if self.processes > 1:
            cases.append(self.case(max(self.streams), self.processes))
        if self.burst:
            cases.append(Case(f"{self.burst} at once", self.burst, 1, self.burst, self.burst_max_tokens))
        return cases

    def case(self, streams: int, processes: int) -> Case:
        name = f"{streams} stream{'s' if streams > 1 else ''}"
        if processes > 1:
            name += f", {processes} clients"
        count = max(self.requests_min, streams * self.requests_per_stream)
        return Case(name, streams, processes, count, self.max_tokens)


class OverheadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: our worker on `model`, `http` of our front-ends, and optionally `mlx_lm.server`."""

    model: str
    http: int = 0
    mlx_lm: bool = False
    options: OverheadOptions = OverheadOptions()
    rounds: int = 5
    seed: int = 0


async def overhead(plan: OverheadPlan, on_progress: Progress) -> BenchReport:
    """Start all servers, measure round by round, end them. Raises TargetError."""
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
            return BenchReport(
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
    """Groups of targets: the worker; one HTTP front-end, and all of them together; then the others."""
    ours = [target for target in targets if target.kind == "http" and target.worker]
    groups: dict[str, Sequence[TargetSpec]] = {t.label: [t] for t in targets if t.kind == "worker"}
    groups |= {target.label: [target] for target in ours[:1]}
    if len(ours) > 1:
        groups[f"{ours[0].label} x{len(ours)}"] = ours
    return groups | {t.label: [t] for t in targets if t.kind == "http" and not t.worker}


class OverheadRunner:
    """Runs cases on the bare generator and on `groups`: by name, targets that share the streams."""

    def __init__(
        self,
        bare: BareProcess,
        groups: dict[str, Sequence[TargetSpec]],
        prompts: Prompts,
        options: OverheadOptions,
        *,
        seed: int,
        on_progress: Progress,
    ) -> None:
        self._bare = bare
        self._groups = groups
        self._prompts = prompts
        self._options = options
        self._seed = seed
        self._on_progress = on_progress
        workers = [target for targets in groups.values() for target in targets if target.kind == "worker"]
        self._worker_pids = {pid for worker in workers for pid in worker.pids}

    async def run(self, rounds: int) -> list[Cell]:
        """All cells: admission, while the worker's maxima are fresh; each case round by round; the idle worker."""
        return [cell async for part in self.parts(rounds) for cell in part]

    async def parts(self, rounds: int) -> AsyncIterator[list[Cell]]:
        """The cells of `run`, part by part."""
        worker = next((t for targets in self._groups.values() for t in targets if t.kind == "worker"), None)
        if worker:
            yield [await self._admission(worker)]
        await self._round(self._options.case(min(4, max(self._options.streams)), 1), -1)
        for case in self._options.cases:
            for number in range(rounds):
                self._on_progress(f"overhead: {case.name}, round {number + 1} of {rounds}")
                yield await self._round(case, number)
        if worker:
            yield [await self._idle(worker)]

    async def _round(self, case: Case, number: int) -> list[Cell]:
        requests = self._requests(f"{case.name} {number}", case)
        cells = [
            Cell(
                scenario="overhead",
                case=case.name,
                target=BARE,
                round=number,
                measures=await self._bare_run(requests, case),
            )
        ]
        for index, (label, targets) in enumerate(self._groups.items()):
            # The bare generator has no prefix cache: it and the first group can have the same prompts.
            own = requests if index == 0 else self._requests(f"{case.name} {number} {label}", case)
            cell = Cell(scenario="overhead", case=case.name, target=label, round=number)
            try:
                measures = await self._group_run(targets, own, case)
                cells.append(msgspec.structs.replace(cell, measures=measures))
            except TargetError as error:
                cells.append(msgspec.structs.replace(cell, error=str(error)))
        return cells

    def _requests(self, seed: str, case: Case) -> list[RequestSpec]:
        prompts = self._prompts.reseeded(f"{self._seed} {seed}")
        return [prompts.request(self._options.prompt_tokens, case.max_tokens) for _ in range(case.requests)]

    async def _bare_run(self, requests: Sequence[RequestSpec], case: Case) -> Measures:
        usage = ServerUsage([self._bare.pid])
        before_s = usage.cpu_s() or 0.0
        result = await self._bare.run(
            BareJob(
                prompts=[request.prompt_ids for request in requests],
                max_tokens=case.max_tokens,
                streams=case.streams,
            )
        )
        used_s = (usage.cpu_s() or 0.0) - before_s
        return {
            "tokens": result.tokens,
            "wall_s": result.wall_s,
            "tokens_per_s": result.tokens / result.wall_s,
            "server_cpu_cores": used_s / result.wall_s,
            "server_cpu_per_token_us": used_s * 1e6 / result.tokens,
        }

    async def _group_run(
        self, targets: Sequence[TargetSpec], requests: Sequence[RequestSpec], case: Case
    ) -> Measures:
        """Measure streams and requests divided among client processes, and those among the targets."""
        count = max(min(case.processes, case.streams), min(len(targets), case.streams))
        jobs = [
            LoadJob(
                target=targets[number % len(targets)],
                requests=list(requests[number::count]),
                users=len(range(number, case.streams, count)),
                timeout_s=self._options.timeout_s,
            )
            for number in range(count)
        ]
        pids = {pid for target in targets for pid in target.pids}
        usage, front_ends = ServerUsage(pids), ServerUsage(pids - self._worker_pids)
        numbers = WorkerNumbers(targets[0].worker) if targets[0].worker else None
        try:
            before = await numbers.read() if numbers else {}
            used_before_s, front_before_s = usage.cpu_s() or 0.0, front_ends.cpu_s()
            results = await run_together(jobs)
            used_s = (usage.cpu_s() or 0.0) - used_before_s
            front_after_s, client_s = front_ends.cpu_s(), sum(result.cpu_s for result in results)
            measures = summarise([record for result in results for record in result.records])
            measures["server_cpu_cores"] = used_s / measures["wall_s"]
            measures["client_cpu_cores"] = client_s / measures["wall_s"]
            cpu_s = {"server": used_s, "client": client_s}
            if targets[0].worker and front_before_s is not None and front_after_s is not None:
                cpu_s["front_end"] = front_after_s - front_before_s
            if measures["tokens"]:
                for part, seconds in cpu_s.items():
                    measures[f"{part}_cpu_per_token_us"] = seconds * 1e6 / measures["tokens"]
            return measures | (figures(before, await numbers.read()) if numbers else {})
        finally:
            if numbers:
                await numbers.close()

    async def _admission(self, worker: TargetSpec) -> Cell:
        """The admission of requests that arrive one by one while 3 streams decode."""
        self._on_progress("admission: 3 streams decode, others arrive")
        options = self._options
        prompts = self._prompts.reseeded(f"{self._seed} admission")
        session = await open_session(worker, timeout_s=options.timeout_s)
        numbers = WorkerNumbers(worker.worker)
        try:
            long = [prompts.request(options.prompt_tokens, options.max_tokens * 64) for _ in range(3)]
            async with streams_in_flight(session, long) as streams:
                await asyncio.gather(*(stream.wait_chunks(2) for stream in streams))
                arriving = [prompts.request(options.prompt_tokens, 2) for _ in range(options.arrivals)]
                records = [o.record(None) for o in await closed_loop(session, arriving, 1)]
            measures = spread("ttft", [ttft_ms(record) for record in records])
            measures |= figures({}, await numbers.read())
            return Cell(
                scenario="admission", case="3 others decode", target=worker.label, round=0, measures=measures
            )
        finally:
            await numbers.close()
            await session.close()

    async def _idle(self, worker: TargetSpec) -> Cell:
        """CPU use of a worker with one idle session."""
        self._on_progress(f"idle for {self._options.idle_s:g} s")
        usage = ServerUsage(worker.pids)
        session = await open_session(worker, timeout_s=self._options.timeout_s)
        try:
            await asyncio.sleep(1.0)
            before_s = usage.cpu_s() or 0.0
            await asyncio.sleep(self._options.idle_s)
            used_s = (usage.cpu_s() or 0.0) - before_s
        finally:
            await session.close()
        return Cell(
            scenario="idle",
            case=f"{self._options.idle_s:g} s, one session",
            target=worker.label,
            round=0,
            measures={"idle_cpu_percent": used_s / self._options.idle_s * 100},
        )


@click.command()
@click.option("--model", default="pico", show_default=True, help="pico or a directory.")
@click.option("--http", type=int, default=0, help="Also through this many HTTP front-ends.")
@click.option("--mlx-lm", is_flag=True, help="Also through mlx_lm.server.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=JSON", help="A size: streams=[1,32].")
@seed_option
@out_option
@plot_option
@ranges_option
def main(
    settings: tuple[str, ...],
    out: Path | None,
    picture: Path | None,
    ranges: bool,
    **others: Any,
) -> None:
    """Measure the cost that worker, wire and client add to mlx-lm's own generator."""
    options = with_settings(OverheadOptions(), settings)
    plan = OverheadPlan(options=options, **others)
    finish(stoppable.run(overhead(plan, show_progress)), out, picture, ranges)


if __name__ == "__main__":
    main()
