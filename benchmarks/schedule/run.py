"""`python -m benchmarks.schedule` from arrivals to a report."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy

from benchmarks.schedule.arrivals import TracedRequest, generate, read_requests
from benchmarks.schedule.calls import measure_calls
from benchmarks.schedule.lines import FirstComeFirstServed, Line
from benchmarks.schedule.machine import Machine
from benchmarks.schedule.options import ScheduleOptions
from benchmarks.schedule.replay import Outcome, Replay, Totals
from zmqengine.bench.load.measures import PERCENTILES, Measures
from zmqengine.bench.reports import machine as this_machine
from zmqengine.bench.reports.report import BenchReport, Cell, ModelFacts, TargetFacts
from zmqengine.worker.requests.ticket import PriorityClass
from zmqengine.worker.scheduler.policy import ServiceOrder

Progress = Callable[[str], None]

FAIR = "fair"
LINES: dict[str, tuple[str, Callable[[], Line]]] = {
    "first come": ("by arrival", lambda: FirstComeFirstServed(by_priority=False)),
    "priority": ("by priority, then arrival", lambda: FirstComeFirstServed(by_priority=True)),
    FAIR: ("the worker's order of service", lambda: ServiceOrder(queue_max=1 << 60)),
}
CLASSES = tuple(kind.name.lower() for kind in PriorityClass)
MODEST = "normal, asks little"
WAIT_TOLD_MIN_S = 1.0
"""Estimates of shorter waits are not evaluated."""


class SchedulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: arrivals from the file `trace`, or made from `seed`, another for each round."""

    options: ScheduleOptions = ScheduleOptions()
    trace: Path | None = None
    rounds: int = 1
    seed: int = 0


def schedule(plan: SchedulePlan, on_progress: Progress) -> BenchReport:
    """Replay the same arrivals against each order of service. Raises TargetError for a file that is no trace."""
    setting = this_machine.setting()
    options = plan.options
    model = Machine(options)
    cells: list[Cell] = []
    for number in range(plan.rounds):
        requests = read_requests(plan.trace) if plan.trace else generate(options, model, plan.seed + number)
        for label in LINES:
            on_progress(f"round {number + 1} of {plan.rounds}: {len(requests):,} requests, {label}")
            cells += _replayed(label, requests, options, number)
            case = f"{options.operations_waiting:,} waiting, {options.sessions:,} flows"
            measures = measure_calls(
                LINES[label][1](),
                waiting=options.operations_waiting,
                flows=options.sessions,
                seed=plan.seed + number,
            )
            cells.append(Cell(scenario="calls", case=case, target=label, round=number, measures=measures))
    source = {"trace": plan.trace.name} if plan.trace else {"seed": plan.seed}
    return BenchReport(
        kind="schedule",
        model=ModelFacts(name="none: a step costs what the options say"),
        options={**msgspec.to_builtins(options), "rounds": plan.rounds, **source},
        base=next(iter(LINES)),
        targets=[TargetFacts(label=label, kind="order", server=what) for label, (what, _) in LINES.items()],
        cells=cells,
        **setting,
    )


def _replayed(
    label: str, requests: Sequence[TracedRequest], options: ScheduleOptions, number: int
) -> Iterator[Cell]:
    line = LINES[label][1]()
    started_s = time.process_time()
    outcomes, totals = Replay(options, Machine(options), line).run(requests)
    cpu_s = time.process_time() - started_s
    for case, waits_s in waits_by_case(outcomes).items():
        yield Cell(
            scenario="schedule", case=case, target=label, round=number, measures=wait_measures(waits_s)
        )
    measures = service_measures(outcomes, totals) | {"replay_cpu_s": cpu_s}
    if isinstance(line, ServiceOrder):
        measures["aged_starts"] = line.aged_starts
    yield Cell(scenario="service", case="all", target=label, round=number, measures=measures)


def waits_by_case(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds to the first row, by class; and of the normal class those who ask for less than the mean of it."""
    cases: dict[str, list[float]] = {case: [] for case in (*CLASSES, MODEST)}
    asked: Counter[str] = Counter()
    normal = [outcome for outcome in outcomes if _case(outcome) == "normal"]
    for outcome in normal:
        asked[outcome.request.session] += _tokens(outcome)
    mean = asked.total() / max(1, len(asked))
    for outcome in outcomes:
        cases[_case(outcome)].append(outcome.wait_s)
    cases[MODEST] = [outcome.wait_s for outcome in normal if asked[outcome.request.session] < mean]
    return {case: waits_s for case, waits_s in cases.items() if waits_s}


def wait_measures(waits_s: Sequence[float]) -> Measures:
    """Percentiles and maximum of waits."""
    values = numpy.percentile(waits_s, PERCENTILES)
    spread = {f"wait_p{percent}_s": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"requests": len(waits_s), **spread, "wait_max_s": max(waits_s)}


def service_measures(outcomes: Sequence[Outcome], totals: Totals) -> Measures:
    """Figures of the whole replay."""
    told = [
        outcome.estimate_s / outcome.wait_s
        for outcome in outcomes
        if outcome.estimate_s is not None and outcome.wait_s >= WAIT_TOLD_MIN_S
    ]
    measures: Measures = {
        "requests": len(outcomes),
        "lasted_s": totals.lasted_s,
        "tokens_per_s": totals.made_tokens / totals.lasted_s,
        "parked": totals.parked,
        "displaced": totals.displaced,
        "reread_tokens": totals.reread_tokens,
        "waiting_max": totals.waiting_max,
        "kv_max_tokens": totals.kv_tokens_max,
    }
    if totals.jain is not None:
        measures["jain"] = totals.jain
    if told:
        measures["estimate_to_wait"] = statistics.median(told)
    return measures


def _case(outcome: Outcome) -> str:
    return PriorityClass.of(outcome.request.priority).name.lower()


def _tokens(outcome: Outcome) -> int:
    return outcome.request.prompt_tokens + outcome.request.output_tokens
