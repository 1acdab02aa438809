"""Reports of runs: one JSON file with figures, machine, versions and command."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from zmqengine.bench.load.measures import Measures
from zmqengine.bench.targets.target import TargetError

FORMAT = 1


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One case of one scenario against one target in one round.

    `error` says why there are no measures, `failures` why some requests failed, and how many.
    """

    scenario: str
    case: str
    target: str
    round: int
    measures: Measures = {}
    error: str = ""
    failures: dict[str, int] = {}


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    kind: str
    server: str = ""
    facts: dict[str, str] = {}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model behind the targets, as far as it is known. `random_weights` is stated with all figures."""

    name: str
    random_weights: bool = False
    parameters: int | None = None
    dtype: str = ""


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmark `kind`. `targets` are in the order given; ratios are to `base`, one of their labels."""

    format: int = FORMAT
    kind: str
    started_at: str
    command: list[str]
    machine: dict[str, str]
    versions: dict[str, str]
    model: ModelFacts
    options: dict[str, object]
    base: str
    targets: list[TargetFacts]
    cells: list[Cell]
    notes: list[str] = []

    def scenarios(self) -> list[str]:
        """Names of scenarios, in the order measured."""
        return list(dict.fromkeys(cell.scenario for cell in self.cells))

    def cases(self, scenario: str) -> list[str]:
        """Cases of one scenario, in the order measured."""
        return list(dict.fromkeys(cell.case for cell in self.cells if cell.scenario == scenario))

    def labels(self) -> list[str]:
        """The targets."""
        return [target.label for target in self.targets]


class Figure(NamedTuple):
    """A measure over rounds: median and range, and the median of its ratios to the base, round by round."""

    median: float
    least: float
    greatest: float
    rounds: int
    ratio: float | None = None


class Rounds:
    """The figures of a report, by scenario, case, target and measure."""

    def __init__(self, report: BenchReport) -> None:
        self._base = report.base
        self._values: dict[tuple[str, str, str, str], dict[int, float]] = {}
        for cell in report.cells:
            for name, value in cell.measures.items():
                key = (cell.scenario, cell.case, cell.target, name)
                self._values.setdefault(key, {})[cell.round] = value

    def figure(self, scenario: str, case: str, target: str, measure: str) -> Figure | None:
        """The figure, None if it was not measured. Only rounds in which both were measured make a ratio."""
        own = self._values.get((scenario, case, target, measure))
        if not own:
            return None
        values = list(own.values())
        figure = Figure(statistics.median(values), min(values), max(values), len(values))
        base = self._values.get((scenario, case, self._base, measure), {})
        if target == self._base:
            return figure
        ratios = [value / base[number] for number, value in own.items() if base.get(number)]
        if not ratios:
            return figure
        return figure._replace(ratio=statistics.median(ratios))

    def __iter__(self) -> Iterator[tuple[str, str, str, str]]:
        """Every (scenario, case, target, measure) there is."""
        return iter(self._values)


def errors_of(cells: Iterable[Cell]) -> Sequence[str]:
    """One line for each cell that could not be measured."""
    return [f"{cell.scenario}, {cell.case}, {cell.target}: {cell.error}" for cell in cells if cell.error]


def failures_of(cells: Iterable[Cell]) -> Sequence[str]:
    """One line for each kind of failure of requests, over all rounds."""
    counted: Counter[str] = Counter()
    for cell in cells:
        for reason, count in cell.failures.items():
            counted[f"{cell.scenario}, {cell.case}, {cell.target}: {reason}"] += count
    return [f"{text} ({count} requests)" for text, count in counted.items()]


def save(report: BenchReport, path: Path) -> None:
    """Write it, readable by people and by `load`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = msgspec.structs.replace(
        report,
        cells=[
            msgspec.structs.replace(
                cell, measures={name: _short(value) for name, value in cell.measures.items()}
            )
            for cell in report.cells
        ],
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounded), indent=1) + b"\n")


def load(path: Path) -> BenchReport:
    """Read a report. Raises TargetError if the file is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchReport)
    except (msgspec.DecodeError, OSError) as error:
        raise TargetError(f"{path} is not a report of zmqengine bench: {error}") from error


def _short(value: float) -> float:
    return float(f"{value:.6g}")
