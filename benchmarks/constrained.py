"""`python -m benchmarks.constrained`: the cost of output constraints.

Unconstrained and constrained requests alternate on one worker, with the same prompts and lengths. The schema is that
of a planning tool of agents; under it a model of random weights never ends, so every answer has exactly the requested
number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from zmqengine.bench import stoppable
from zmqengine.bench.arguments import server_target, with_settings
from zmqengine.bench.load.loops import closed_loop, collector_off, streams_in_flight
from zmqengine.bench.load.measures import Measures, longest_silence_ms, spread, summarise, ttft_ms
from zmqengine.bench.load.prompts import Prompts, prompts_for, vocabulary_of_file
from zmqengine.bench.models.model_facts import model_facts
from zmqengine.bench.models.model_shapes import SHAPES
from zmqengine.bench.models.random_model import model_directory_of
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, TargetFacts
from zmqengine.bench.reports.target_facts import target_facts
from zmqengine.bench.servers.started import StartPlan, started
from zmqengine.bench.targets.records import RequestSpec
from zmqengine.bench.targets.server_usage import ServerUsage
from zmqengine.bench.targets.target import TargetError, TargetSession, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session
from zmqengine.cli.commands.bench import finish, out_option, ranges_option, seed_option, show_progress
from zmqengine.protocol.messages import Constraint

FREE, SEEN, NEW = "free", "constrained", "new schema"
Progress = Callable[[str], None]
PLAN: dict[str, object] = {
    "type": "object",
    "properties": {
        "todos": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1, "maxLength": 40},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    "priority": {"type": "integer", "minimum": 1, "maximum": 9},
                    "id": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{1,3}$"},
                },
                "required": ["content", "status", "priority", "id"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["todos"],
    "additionalProperties": False,
}
HOSTILE: dict[str, Constraint] = {
    "nothing": Constraint("json_schema", json.dumps(PLAN)),
    "regex that backtracks": Constraint("regex", "((a|aa)*)*b"),
    "regex that counts": Constraint("regex", "((a|b)*a(a|b){60}){20}c"),
    "schema 200 deep": Constraint("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
    "10,000 values": Constraint(
        "json_schema", json.dumps({"enum": [f"value {number} of many" for number in range(10_000)]})
    ),
}


CONSTRAINED_WORK = ("all rows", "half of the rows", "first token", "hostile")


class ConstrainedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work and sizes.

    `firsts` requests of each kind are timed; each hostile constraint is sent `hostiles` times.
    """

    work: tuple[str, ...] = CONSTRAINED_WORK
    rows: int = 32
    requests_per_row: int = 2
    prompt_tokens: int = 64
    max_tokens: int = 128
    firsts: int = 20
    hostiles: int = 5
    honest_tokens: int = 8000
    http_rows: int = 8
    timeout_s: float = 180.0


class ConstrainedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a worker for each shape in turn. `peers`, and with `http` our front-end, serve the first over HTTP."""

    shapes: tuple[str, ...]
    models: str = ""
    http: bool = False
    peers: tuple[TargetSpec, ...] = ()
    options: ConstrainedOptions = ConstrainedOptions()
    rounds: int = 5
    seed: int = 0


async def constrained(plan: ConstrainedPlan, on_progress: Progress) -> BenchReport:
    """Make the models, measure one after the other, end all servers. Raises TargetError."""
    setting = machine.setting()
    cells: list[Cell] = []
    servers: list[TargetFacts] = []
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="zmqengine-bench-models-"))
        on_progress("making the models")
        models = [model_directory_of(shape, Path(plan.models or scratch)) for shape in plan.shapes]
        for index, (shape, model) in enumerate(zip(plan.shapes, models, strict=True)):
            prompts = prompts_for(vocabulary_of_file(model / "tokenizer.json"), f"{plan.seed} {shape}")
            http = int(plan.http and index == 0)
            async with started(StartPlan(model=str(model), http=http)) as targets:
                worker = targets[0]
                if index == 0:
                    known = (await target_facts(worker)).facts
                    servers = [
                        TargetFacts(label=kind, kind="worker", facts=known) for kind in (FREE, SEEN, NEW)
                    ]
                runner = ConstrainedRunner(worker, prompts, plan.options, shape, on_progress)
                cells += await runner.run(plan.rounds)
                over_http = [*targets[1:], *plan.peers] if index == 0 else []
                for target in over_http:
                    servers.append(await target_facts(target))
                for number in range(plan.rounds if over_http else 0):
                    for target in over_http:
                        chat = msgspec.structs.replace(target, api="chat")
                        on_progress(f"{target.label}: round {number + 1} of {plan.rounds}")
                        cells += await json_mode(chat, prompts, plan.options, number)
        return BenchReport(
            kind="constrained",
            model=model_facts(str(models[0])),
            options={**msgspec.to_builtins(plan.options), "rounds": plan.rounds, "seed": plan.seed},
            base=FREE,
            targets=servers,
            cells=cells,
            **setting,
        )


class ConstrainedRunner:
    """Measurements on one worker; `model` names its cases."""

    def __init__(
        self,
        worker: TargetSpec,
        prompts: Prompts,
        options: ConstrainedOptions,
        model: str,
        progress: Progress,
    ) -> None:
        self._worker = worker
        self._prompts = prompts
        self._options = options
        self._model = model
        self._progress = progress
        self._new = 0

    async def run(self, rounds: int) -> list[Cell]:
        session = await open_session(self._worker, timeout_s=self._options.timeout_s)
        try:
            # The vocabulary's trie is built in the background after the model has loaded.
            await self._together(session, [self._request(SEEN), self._request(FREE)] * 4, 4)
            cells: list[Cell] = []
            for number in range(rounds):
                self._progress(f"{self._model}: round {number + 1} of {rounds}")
                kinds = (FREE, SEEN) if number % 2 else (SEEN, FREE)
                for work, measure in (("all rows", self._all), ("half of the rows", self._half)):
                    for kind in kinds if work in self._options.work else ():
                        cells.append(await self._cell(work, kind, number, measure(session, kind)))
            for number in range(rounds if "first token" in self._options.work else 0):
                for kind in (FREE, SEEN, NEW):
                    cells.append(await self._cell("first token", kind, number, self._firsts(session, kind)))
            for name, constraint in HOSTILE.items() if "hostile" in self._options.work else ():
                self._progress(f"{self._model}: {name} beside an honest stream")
                case = f"{self._model}: {name}"
                cells.append(await self._cell("hostile", FREE, 0, self._beside(session, constraint), case))
            return cells
        finally:
            await session.close()

    async def _cell(
        self, scenario: str, kind: str, number: int, work: Awaitable[Measures], case: str = ""
    ) -> Cell:
        usage = ServerUsage(self._worker.pids)
        before_s = usage.cpu_s() or 0.0
        cell = Cell(scenario=scenario, case=case or self._model, target=kind, round=number)
        try:
            measures = await work
        except TargetError as error:
            return msgspec.structs.replace(cell, error=str(error))
        if measures.get("tokens"):
            used_s = (usage.cpu_s() or 0.0) - before_s
            measures["server_cpu_per_token_us"] = used_s * 1e6 / measures["tokens"]
        return msgspec.structs.replace(cell, measures=measures)

    async def _all(self, session: TargetSession, kind: str) -> Measures:
        options = self._options
        requests = [self._request(kind) for _ in range(options.rows * options.requests_per_row)]
        return await self._together(session, requests, options.rows)

    async def _half(self, session: TargetSession, kind: str) -> Measures:
        """Figures of unconstrained requests on half of the rows, with requests of this kind on the others."""
        options = self._options
        half = options.rows // 2
        ended = asyncio.Event()

        async def other() -> None:
            while not ended.is_set():
                await session.send(self._request(kind)).outcome()

        others = [asyncio.ensure_future(other()) for _ in range(half)]
        try:
            requests = [self._request(FREE) for _ in range(half * options.requests_per_row)]
            return await self._together(session, requests, half)
        finally:
            ended.set()
            await asyncio.gather(*others)

    async def _firsts(self, session: TargetSession, kind: str) -> Measures:
        """Times to the first token of requests in sequence, on an otherwise idle worker."""
        requests = [self._request(kind, tokens=2) for _ in range(self._options.firsts)]
        records = [outcome.record(None) for outcome in await closed_loop(session, requests, 1)]
        _must_be_whole([record.error for record in records])
        return spread("ttft", [ttft_ms(record) for record in records])

    async def _beside(self, session: TargetSession, constraint: Constraint) -> Measures:
        """The longest gap of an unconstrained stream while requests with this constraint arrive in sequence."""
        options = self._options
        honest = self._request(FREE, tokens=options.honest_tokens)
        async with streams_in_flight(session, [honest]) as (stream,):
            await stream.wait_chunks(8)
            started_s = time.perf_counter()
            with collector_off():
                for _ in range(options.hostiles):
                    attack = msgspec.structs.replace(self._request(FREE, tokens=32), constraint=constraint)
                    await session.send(attack).outcome()
            ended_s = time.perf_counter()
            # The gap in which the last one ended lasts until the next token.
            await stream.wait_chunks(stream.chunks + 1)
            stream.cancel()
            record = (await stream.outcome()).record(None)
        silence_ms = longest_silence_ms(record, started_s, ended_s)
        if silence_ms is None:
            raise TargetError("the honest stream ended before what came beside it")
        return {"silence_max_ms": silence_ms}

    async def _together(
        self, session: TargetSession, requests: Sequence[RequestSpec], users: int
    ) -> Measures:
        records = [outcome.record(None) for outcome in await closed_loop(session, requests, users)]
        _must_be_whole([record.error for record in records])
        wanted = sum(request.max_tokens for request in requests)
        if sum(record.tokens for record in records) != wanted:
            raise TargetError(f"answers have {sum(record.tokens for record in records)} tokens, not {wanted}")
        return summarise(records)

    def _request(self, kind: str, *, tokens: int = 0) -> RequestSpec:
        request = self._prompts.request(self._options.prompt_tokens, tokens or self._options.max_tokens)
        return (
            request if kind == FREE else msgspec.structs.replace(request, constraint=self._constraint(kind))
        )

    def _constraint(self, kind: str) -> Constraint:
        schema = PLAN
        if kind == NEW:
            self._new += 1
            schema = {**PLAN, "description": f"number {self._new}"}
        return Constraint("json_schema", json.dumps(schema))


async def json_mode(
    target: TargetSpec, prompts: Prompts, options: ConstrainedOptions, number: int
) -> list[Cell]:
    """Cells of the same work over HTTP, unconstrained and in a server's JSON mode."""
    session = await open_session(target, timeout_s=options.timeout_s)
    cells = []
    try:
        for case in (FREE, SEEN):
            requests = [
                prompts.request(options.prompt_tokens, options.max_tokens) for _ in range(options.http_rows)
            ]
            if case == SEEN:
                constraint = Constraint("json_schema", json.dumps(PLAN))
                requests = [msgspec.structs.replace(request, constraint=constraint) for request in requests]
            outcomes = await closed_loop(session, requests, options.http_rows)
            records = [outcome.record(prompts.count_tokens) for outcome in outcomes]
            cell = Cell(scenario="JSON mode over HTTP", case=case, target=target.label, round=number)
            error = next((record.error for record in records if record.error), "")
            cells.append(
                msgspec.structs.replace(cell, error=error)
                if error
                else msgspec.structs.replace(cell, measures=summarise(records))
            )
    finally:
        await session.close()
    return cells


def _must_be_whole(errors: Sequence[str]) -> None:
    if failed := next(filter(None, errors), ""):
        raise TargetError(failed)


@click.command()
@click.option(
    "--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the random models here."
)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(tuple(SHAPES)), help="[default: 25m and 128k]"
)
@click.option("--work", multiple=True, type=click.Choice(CONSTRAINED_WORK), help="[default: everything]")
@click.option("--http", is_flag=True, help="Also through our HTTP front-end.")
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="[LABEL=]URL[#MODEL]",
    help="A server that serves the first model and has a JSON mode.",
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=JSON", help="A size: rows=16.")
@seed_option
@out_option
@ranges_option
def main(
    models: Path | None,
    shapes: tuple[str, ...],
    work: tuple[str, ...],
    http: bool,
    urls: tuple[str, ...],
    settings: tuple[str, ...],
    out: Path | None,
    ranges: bool,
    **others: Any,
) -> None:
    """Measure the cost of a schema: on all rows, on some rows, on the first token, and of hostile schemas."""
    plan = ConstrainedPlan(
        shapes=shapes or ("25m", "128k"),
        models=str(models or ""),
        http=http,
        peers=tuple(server_target(text, "chat") for text in urls),
        options=with_settings(ConstrainedOptions(work=work) if work else ConstrainedOptions(), settings),
        **others,
    )
    finish(stoppable.run(constrained(plan, show_progress)), out, None, ranges)


if __name__ == "__main__":
    main()
