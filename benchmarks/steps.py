"""`python -m benchmarks.steps MODEL`: milliseconds of the engine's steps, in one process and without a client.

Side by side are rows that joined together and rows that joined in turn, greedy rows and rows that sample, and calls of
the model with one token for each row or several. It measures by patching the engine's functions that start a step and
read its result.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import click
import msgspec

from zmqengine.engine.open import open_mlx_engine  # first: it chooses what MLX binds to

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.bench.load.measures import Measures
from zmqengine.bench.models.model_facts import model_facts
from zmqengine.bench.reports import machine
from zmqengine.bench.reports.report import BenchReport, Cell, TargetFacts
from zmqengine.cli.commands.bench import finish, out_option, ranges_option, show_progress
from zmqengine.engine import kv
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.sampling.draw import SAMPLED
from zmqengine.engine.sampling.penalties import PENALISED
from zmqengine.engine.step import decode


class StepsResult(msgspec.Struct, kw_only=True):
    """Median milliseconds of a step on the host, by kind of batch.

    `parts_ms` splits a step into building its graph, starting it, and waiting for the device. `changes_ms` is the extra
    cost of one row that joins the batch, its prompt included, and of one that ends. `operations` counts MLX operations
    started in a step, and for such a change. `widths` are calls of the model with several tokens for each row: by rows,
    the cost of each width relative to width 1, whose milliseconds are `width_one_ms`.
    """

    facts: dict[str, str] = {}
    open_s: float = 0.0
    step_ms: dict[str, float] = {}
    parts_ms: dict[str, dict[str, float]] = {}
    changes_ms: dict[str, dict[str, float]] = {}
    operations: dict[str, dict[str, float]] = {}
    widths: dict[str, dict[str, float]] = {}
    width_one_ms: dict[str, float] = {}


ROWS = (1, 8, 32, 64)
WIDTH_ROWS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (1, 2, 3, 4, 6, 8)
COMPARED_ROWS = 32
_PROMPT = 64
_SETTLE = 10
_STEPS = 40
_TRIES = 10
_CHANGES = 9
_AROUND = 6
GREEDY = Sampling()
ENGINE = "engine"


class Steps:
    """Runs rows in an engine and times its steps."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ids = count(1)

    def run(
        self,
        rows: int,
        sampling: Sampling = GREEDY,
        *,
        in_turn: bool = False,
        logprobs: int | None = None,
    ) -> float:
        """The median step of a batch in steady state, in milliseconds."""
        requests = [
            RowRequest(
                row=next(self._ids),
                prompt=[1 + (number * 131 + place * 17) % 1000 for place in range(_PROMPT)],
                max_tokens=_STEPS + _SETTLE + 3 * rows + 8,
                sampling=sampling,
                seed=number,
                logprobs=logprobs,
            )
            for number in range(rows)
        ]
        for group in [[request] for request in requests] if in_turn else [requests]:
            self._engine.insert(group)
            self._engine.next()
        while self._engine.stats().rows_prefilling:
            self._engine.next()
        for _ in range(_SETTLE):
            self._engine.next()
        times = [self._step() for _ in range(_STEPS)]
        self._engine.remove([request.row for request in requests])
        self._engine.limit_prompt_cache(0)
        return statistics.median(times) * 1000

    def parts(self, rows: int) -> dict[str, float]:
        """Milliseconds of the host's parts of such a step."""
        launch, land = Timer(kv.start), Timer(decode.DecodeBatch._land)
        starts: Any = vars(decode)["kv"]
        steps: Any = decode.DecodeBatch
        saved = starts.start, steps._land
        starts.start = launch.call
        steps._land = lambda *given: land.call(*given)  # noqa: PLW0108 - bound to the batch
        try:
            whole = self.run(rows)
        finally:
            starts.start, steps._land = saved
        starting, waiting = launch.median_ms(), land.median_ms()
        return {
            "step": whole,
            "start": starting,
            "wait": waiting,
            "build and report": whole - starting - waiting,
        }

    def changes(self, rows: int) -> dict[str, float]:
        """Extra milliseconds of a row that joins a batch of this size, and of its end."""
        return {name: value * 1000 for name, value in self._around_one(rows, self._step).items()}

    def operations(self, rows: int) -> dict[str, float]:
        """The number of MLX operations started in such a step, and for such changes."""
        counted: list[int] = []

        def count_and_start(*arrays: Any) -> None:
            counted.append(operations(*arrays))
            started(*arrays)

        def step() -> float:
            counted.clear()
            self._engine.next()
            return float(sum(counted))

        started: Any = mx.async_eval
        vars(mx)["async_eval"] = count_and_start
        try:
            return self._around_one(rows, step)
        finally:
            vars(mx)["async_eval"] = started

    def _around_one(self, rows: int, step: Callable[[], float]) -> dict[str, float]:
        """The result of `step` for a steady step, and the excess of steps around a row that joins, and that ends."""
        others = [self._request(number, 2048) for number in range(rows)]
        self._engine.insert(others)
        for _ in range(_SETTLE):
            self._engine.next()
        usual: list[float] = []
        joins: list[float] = []
        leaves: list[float] = []
        for number in range(_CHANGES):
            # Several: the shapes of the first ones are new to the device.
            last = self._request(rows + number, _AROUND * 2 + 1)
            self._engine.insert([last])
            found = [step() for _ in range(_AROUND * 2 + 4)]
            usual += found[_AROUND : _AROUND * 2 - 1]
            joins.append(sum(found[:_AROUND]))
            leaves.append(sum(found[_AROUND * 2 - 1 :]))
        self._engine.remove([request.row for request in others])
        self._engine.limit_prompt_cache(0)
        one = statistics.median(usual)
        return {
            "step": one,
            "join": statistics.median(joins) - one * _AROUND,
            "end": statistics.median(leaves) - one * 5,
        }

    def _request(self, number: int, tokens: int) -> RowRequest:
        prompt = [1 + (number * 131 + place * 17) % 1000 for place in range(_PROMPT)]
        return RowRequest(row=next(self._ids), prompt=prompt, max_tokens=tokens, sampling=GREEDY, seed=number)

    def _step(self) -> float:
        started_s = time.perf_counter()
        self._engine.next()
        return time.perf_counter() - started_s


def operations(*arrays: Any) -> int:
    """The number of operations in the graph of these arrays."""
    text = io.StringIO()
    named: Any = tree_flatten(list(arrays))
    mx.export_to_dot(text, *[one[1] for one in named])
    return text.getvalue().count("shape=rectangle")


class Timer:
    """A function, and the times of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds: list[float] = []

    def call(self, *arguments: Any) -> Any:
        """Call it."""
        started_s = time.perf_counter()
        result = self._function(*arguments)
        self._seconds.append(time.perf_counter() - started_s)
        return result

    def median_ms(self) -> float:
        """Median milliseconds of the last calls."""
        return statistics.median(self._seconds[-_STEPS:] or [0.0]) * 1000


def width_costs(engine: Any, result: StepsResult, rows_max: int) -> None:
    """Time calls of the model by width, for rows of unequal lengths."""
    alone, model = [], engine._model
    for extra in range(4):
        caches = kv.new_caches(model)
        mx.eval(kv.prefill_row(model, caches, [1 + place % 100 for place in range(_PROMPT + extra)]))
        alone.append(caches)
    for rows in WIDTH_ROWS:
        if rows > rows_max:
            break
        batch = kv.KVBatch.merge(
            [alone[place % 4] for place in range(rows)],
            [_PROMPT + place % 4 for place in range(rows)],
            engine._kernels,
        )
        times = {width: _call_s(model, batch, width) for width in WIDTHS}
        result.width_one_ms[str(rows)] = times[1] * 1000
        result.widths[str(rows)] = {str(width): times[width] / times[1] for width in WIDTHS}


def _call_s(model: Any, batch: kv.KVBatch, width: int) -> float:
    inputs = mx.array(
        [[1 + (row + place) % 100 for place in range(width)] for row in range(len(batch))], dtype=mx.uint32
    )
    times = []
    for number in range(_TRIES + 2):
        started_s = time.perf_counter()
        tokens = mx.argmax(model(inputs, cache=batch.begin_step(inputs)), axis=-1)
        mx.eval(tokens)
        if number > 1:
            times.append(time.perf_counter() - started_s)
        batch.roll_back([width] * len(batch))
    return statistics.median(times)


def steps_cells(result: StepsResult) -> list[Cell]:
    """The result as cells of a report."""

    def cell(scenario: str, case: str, measures: Measures) -> Cell:
        return Cell(scenario=scenario, case=case, target=ENGINE, round=0, measures=measures)

    found = [cell("steps", "start", {"open_s": result.open_s})]
    found += [cell("steps", case, {"step_ms": value}) for case, value in result.step_ms.items()]
    found += [
        cell("step parts", case, {f"{name.replace(' ', '_')}_ms": value for name, value in parts.items()})
        for case, parts in result.parts_ms.items()
    ]
    found += [
        cell("changes", case, {f"{name}_ms": value for name, value in parts.items()})
        for case, parts in result.changes_ms.items()
    ]
    found += [
        cell("operations", case, {f"{name}_operations": value for name, value in parts.items()})
        for case, parts in result.operations.items()
    ]
    for rows, costs in result.widths.items():
        widths = {f"width_{width}_cost": value for width, value in costs.items()}
        found.append(cell("widths", f"{rows} rows", {"width_1_ms": result.width_one_ms[rows], **widths}))
    return found


def measure_steps(directory: Path, on_progress: Callable[[str], None]) -> BenchReport:
    """Open the engine on one model and measure its steps."""
    setting = machine.setting()
    result = measure(str(directory), on_progress)
    return BenchReport(
        kind="steps",
        model=model_facts(str(directory)),
        options={},
        base=ENGINE,
        targets=[TargetFacts(label=ENGINE, kind="in process", server="zmqengine", facts=result.facts)],
        cells=steps_cells(result),
        **setting,
    )


def measure(directory: str, on_progress: Callable[[str], None]) -> StepsResult:
    """All measurements on one engine, without drafts."""
    result = StepsResult()
    started_s = time.perf_counter()

    def report(stage: str, fraction: float | None) -> None:
        part = "" if fraction is None else f" {fraction:.0%}"
        on_progress(f"{time.perf_counter() - started_s:6.1f} s {stage}{part}")

    opened = open_mlx_engine(directory, EngineOptions(rows_max=max(ROWS), speculate="off"), report=report)
    result.open_s = time.perf_counter() - started_s
    result.facts = opened.facts
    steps = Steps(opened.engine)
    for rows in ROWS:
        result.step_ms[f"{rows} rows"] = steps.run(rows)
    for number in (1, 2):
        result.step_ms[f"{COMPARED_ROWS} rows together, {number}"] = steps.run(COMPARED_ROWS)
        result.step_ms[f"{COMPARED_ROWS} rows in turn, {number}"] = steps.run(COMPARED_ROWS, in_turn=True)
        result.step_ms[f"{COMPARED_ROWS} rows sampled, {number}"] = steps.run(COMPARED_ROWS, SAMPLED[0])
    result.step_ms[f"{COMPARED_ROWS} rows with penalties"] = steps.run(COMPARED_ROWS, PENALISED)
    result.step_ms[f"{COMPARED_ROWS} rows with logprobs"] = steps.run(COMPARED_ROWS, logprobs=5)
    result.parts_ms[f"{COMPARED_ROWS} rows"] = steps.parts(COMPARED_ROWS)
    result.parts_ms["1 row"] = steps.parts(1)
    for rows in (8, COMPARED_ROWS):
        result.changes_ms[f"{rows} rows"] = steps.changes(rows)
        result.operations[f"{rows} rows"] = steps.operations(rows)
    width_costs(opened.engine, result, max(ROWS))
    return result


@click.command()
@click.argument("model", type=click.Path(path_type=Path, file_okay=False, exists=True))
@out_option
@ranges_option
def main(model: Path, out: Path | None, ranges: bool) -> None:
    """Measure the steps of the engine on the model in the directory MODEL, which nobody else uses meanwhile."""
    finish(measure_steps(model, show_progress), out, None, ranges)


if __name__ == "__main__":
    main()
