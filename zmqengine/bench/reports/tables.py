"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from zmqengine.bench.load.measures import kind_of
from zmqengine.bench.reports.report import BenchReport, Figure, Rounds, errors_of, failures_of
from zmqengine.bench.reports.shown_measures import SHOWN
from zmqengine.bench.scenarios import SCENARIO_NAMES, scenario_named

MANY_CASES = 3


class Table(NamedTuple):
    """A heading and rows of text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(report: BenchReport, *, ranges: bool = False) -> list[Table]:
    """One table a scenario; where it has many cases, one a measure."""
    rounds = Rounds(report)
    tables: list[Table] = []
    for scenario in report.scenarios():
        cases, shown = report.cases(scenario), shown_measures(scenario)
        if len(cases) >= MANY_CASES:
            tables += _by_case(report, rounds, scenario, cases, shown, ranges)
        else:
            tables += _by_measure(report, rounds, scenario, cases, shown, ranges)
    return tables


def shown_measures(scenario: str) -> Sequence[str]:
    """The measures of a short table, the most telling first."""
    if scenario in SCENARIO_NAMES:
        return scenario_named(scenario).shown
    return SHOWN.get(scenario, ())


def _by_case(
    report: BenchReport,
    rounds: Rounds,
    scenario: str,
    cases: Sequence[str],
    shown: Sequence[str],
    ranges: bool,
) -> list[Table]:
    tables = []
    for measure in shown:
        rows = []
        for label in report.labels():
            figures = [rounds.figure(scenario, case, label, measure) for case in cases]
            if any(figures):
                rows.append([label, *(text_of(f, measure, ranges=ranges) for f in figures)])
        if rows:
            tables.append(Table(f"{scenario}: {kind_of(measure).heading}", ["", *cases], rows))
    return tables


def _by_measure(
    report: BenchReport,
    rounds: Rounds,
    scenario: str,
    cases: Sequence[str],
    shown: Sequence[str],
    ranges: bool,
) -> list[Table]:
    places = [(case, label) for case in cases for label in report.labels()]
    measured = [
        measure for measure in shown if any(rounds.figure(scenario, *place, measure) for place in places)
    ]
    rows = []
    for case, label in places:
        figures = [rounds.figure(scenario, case, label, measure) for measure in measured]
        if any(figures):
            name = label if len(cases) == 1 else f"{case}: {label}"
            texts = [text_of(f, m, ranges=ranges) for f, m in zip(figures, measured, strict=True)]
            rows.append([name, *texts])
    title = f"{scenario}: {cases[0]}" if len(cases) == 1 else scenario
    return [Table(title, ["", *(kind_of(measure).heading for measure in measured)], rows)] if rows else []


def text_of(figure: Figure | None, measure: str, *, ranges: bool = False) -> str:
    """`median (x ratio)`, or a dash; with `ranges` also the least and greatest. Counts have no ratio."""
    if figure is None:
        return "-"
    text = number_text(figure.median)
    if ranges and figure.rounds > 1:
        text += f" [{number_text(figure.least)} to {number_text(figure.greatest)}]"
    return f"{text} (x{figure.ratio:.2f})" if figure.ratio is not None and kind_of(measure).is_rate else text


def number_text(value: float) -> str:
    """Three figures, and thousands apart."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def preface(report: BenchReport) -> list[str]:
    """Lines above the tables: machine and versions, model, base of ratios, notes."""
    return [machine_line(report), model_line(report), ratio_line(report), *report.notes]


def machine_line(report: BenchReport) -> str:
    """The machine and what ran on it."""
    machine = report.machine
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    blas = next(
        (facts["blas"] for facts in (target.facts for target in report.targets) if "blas" in facts), ""
    )
    where = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}"
    return f"{where}; {packages}{f'; BLAS {blas} on one thread' if blas else ''}"


def model_line(report: BenchReport) -> str:
    """The model, and whether its weights are random."""
    model = report.model
    size = f", {model.parameters:,} parameters" if model.parameters else ""
    kind = (
        ", random weights (it writes nonsense; its cost is that of a trained model)"
        if model.random_weights
        else ""
    )
    return f"model {model.name}{size}{f', {model.dtype}' if model.dtype else ''}{kind}"


def ratio_line(report: BenchReport) -> str:
    """Medians and the base of ratios."""
    return f"medians over rounds; ratios are to {report.base}, round by round"


def show(report: BenchReport, console: Console, *, ranges: bool = False) -> None:
    """Print the whole report."""
    for line in preface(report):
        console.print(line, style="dim", highlight=False)
    for table in tables_of(report, ranges=ranges):
        console.print(rich_table(table))
    for line in errors_of(report.cells):
        console.print(f"not measured: {line}", style="red", highlight=False)
    for line in failures_of(report.cells):
        console.print(f"failed: {line}", style="red", highlight=False)


def rich_table(table: Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left")
    for number, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in table.rows:
        rich.add_row(*row)
    return rich
