"""`bench overhead`: what the worker, the wire and the client add to mlx-lm's generator.

Interleaved in one run: the bare generator in a process of its own, our worker read by one client process and by
several, and if asked for our HTTP front-ends and `mlx_lm.server`. Same prompts and lengths, the same BLAS on one
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from zmqengine.bench.bare import BareJob
from zmqengine.bench.bare_process import BareProcess
from zmqengine.bench.load import closed_loop, streams_in_flight
from zmqengine.bench.load_process import LoadJob
from zmqengine.bench.measures import Measures, spread, summarise, ttft_ms
from zmqengine.bench.processes import run_together
from zmqengine.bench.prompts import Prompts
from zmqengine.bench.records import RequestSpec
from zmqengine.bench.report import Cell
from zmqengine.bench.server_usage import ServerUsage
from zmqengine.bench.sessions import open_session
from zmqengine.bench.targets import TargetError, TargetSpec
from zmqengine.bench.worker_numbers import WorkerNumbers, figures

BARE = "bare generator"
Progress = Callable[[str], None]


class OverheadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the work; `processes` is how many clients share the largest number of streams."""

    streams: tuple[int, ...] = (1, 8, 32)
    processes: int = 4
    prompt_tokens: int = 64
    max_tokens: int = 64
    requests_min: int = 16
    requests_per_stream: int = 8
    arrivals: int = 8
    idle_s: float = 10.0
    timeout_s: float = 120.0

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(streams, client processes)."""
        return [*((streams, 1) for streams in self.streams), (max(self.streams), self.processes)]


class OverheadRunner:
    """`groups` are what is measured beside the bare generator: by name, the targets that share the streams."""

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

    async def run(self, rounds: int) -> list[Cell]:
        """Admission first, while the worker's maxima are young; every case round by round; then idleness."""
        worker = next((t for targets in self._groups.values() for t in targets if t.kind == "worker"), None)
        cells = [await self._admission(worker)] if worker else []
        await self._round("warm-up", min(4, max(self._options.streams)), 1, -1)
        for streams, processes in self._options.cases:
            case = f"{streams} stream{'s' if streams > 1 else ''}" + (
                f", {processes} clients" if processes > 1 else ""
            )
            for number in range(rounds):
                self._on_progress(f"overhead: {case}, round {number + 1} of {rounds}")
                cells += await self._round(case, streams, processes, number)
        return [*cells, await self._idle(worker)] if worker else cells

    async def _round(self, case: str, streams: int, processes: int, number: int) -> list[Cell]:
        requests = self._requests(f"{case} {number}", streams)
        cells = [
            Cell(
                scenario="overhead",
                case=case,
                target=BARE,
                round=number,
                measures=await self._bare_run(requests, streams),
            )
        ]
        for place, (label, targets) in enumerate(self._groups.items()):
            # The bare generator has no cache: it and the first group can have the same prompts.
            own = requests if place == 0 else self._requests(f"{case} {number} {label}", streams)
            cell = Cell(scenario="overhead", case=case, target=label, round=number)
            try:
                measures = await self._group_run(targets, own, streams, processes)
                cells.append(msgspec.structs.replace(cell, measures=measures))
            except TargetError as error:
                cells.append(msgspec.structs.replace(cell, error=str(error)))
        return cells

    def _requests(self, seed: str, streams: int) -> list[RequestSpec]:
        options = self._options
        prompts = self._prompts.reseeded(f"{self._seed} {seed}")
        count = max(options.requests_min, streams * options.requests_per_stream)
        return [prompts.request(options.prompt_tokens, options.max_tokens) for _ in range(count)]

    async def _bare_run(self, requests: Sequence[RequestSpec], streams: int) -> Measures:
        usage = ServerUsage([self._bare.pid])
        before_s = usage.cpu_s() or 0.0
        result = await self._bare.run(
            BareJob(
                prompts=[request.prompt_ids for request in requests],
                max_tokens=self._options.max_tokens,
                streams=streams,
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
        self, targets: Sequence[TargetSpec], requests: Sequence[RequestSpec], streams: int, processes: int
    ) -> Measures:
        """Streams and requests dealt out over client processes, and those over the targets."""
        count = max(min(processes, streams), min(len(targets), streams))
        jobs = [
            LoadJob(
                target=targets[number % len(targets)],
                requests=list(requests[number::count]),
                users=len(range(number, streams, count)),
                timeout_s=self._options.timeout_s,
            )
            for number in range(count)
        ]
        usage = ServerUsage({pid for target in targets for pid in target.pids})
        numbers = WorkerNumbers(targets[0].worker) if targets[0].worker else None
        try:
            before = await numbers.read() if numbers else {}
            used_before_s = usage.cpu_s() or 0.0
            results = await run_together(jobs)
            used_s = (usage.cpu_s() or 0.0) - used_before_s
            measures = summarise([record for result in results for record in result.records])
            measures["server_cpu_cores"] = used_s / measures["wall_s"]
            if measures["tokens"]:
                measures["server_cpu_per_token_us"] = used_s * 1e6 / measures["tokens"]
            measures["client_cpu_cores"] = sum(result.cpu_s for result in results) / measures["wall_s"]
            return measures | (figures(before, await numbers.read()) if numbers else {})
        finally:
            if numbers:
                await numbers.close()

    async def _admission(self, worker: TargetSpec) -> Cell:
        """3 streams decode; others arrive one by one."""
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
        """A session is open and nothing is asked."""
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
