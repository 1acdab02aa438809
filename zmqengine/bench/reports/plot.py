"""Plots of a report, as PNG or SVG by the file name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from zmqengine.bench.load.measures import kind_of
from zmqengine.bench.reports.report import BenchReport, Figure, Rounds
from zmqengine.bench.reports.tables import model_line

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text as text and fixed ids, so that an SVG is small and reproducible.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "zmqengine", "font.size": 9}

LINES = (
    ("users", "tokens_per_s"),
    ("users", "ttft_p50_ms"),
    ("users", "ttft_max_ms"),
    ("users", "itl_p99_ms"),
)
BARS = (
    ("overhead", "tokens_per_s"),
    ("overhead", "server_cpu_per_token_us"),
    ("burst", "ttft_max_ms"),
    ("interference", "silence_max_ms"),
    ("interference", "ttft_long_ms"),
    ("prefix", "ttft_p50_ms"),
    ("cancel", "slot_free_p50_ms"),
    ("cancel", "ttft_next_ms"),
    ("overload", "completed"),
    ("overload", "ttft_max_ms"),
    ("agents", "ttft_later_p50_ms"),
    ("two-models", "speedup"),
    ("front-ends", "tokens_per_s"),
    ("front-ends", "itl_p99_ms"),
    ("trace", "ttft_p99_ms"),
    ("schedule", "wait_p50_s"),
    ("schedule", "wait_p99_s"),
    ("service", "jain"),
)
PANELS_PER_ROW = 3


def plot(report: BenchReport, path: Path) -> None:
    """Plot the panels that the report has data for: lines over users, bars otherwise, whiskers for ranges."""
    rounds = Rounds(report)
    measured = {(scenario, measure) for scenario, _, _, measure in rounds}
    panels = [panel for panel in (*LINES, *BARS) if panel in measured]
    columns = 2 if len(panels) in (1, 2, 4) else PANELS_PER_ROW
    rows = max(1, -(-len(panels) // columns))
    with matplotlib.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.1 * rows + 0.9), squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (scenario, measure) in zip(grid.flat, panels, strict=False):
            draw = _draw_lines if (scenario, measure) in LINES else _draw_bars
            draw(axes, report, rounds, scenario, measure)
            axes.set_title(f"{scenario}: {kind_of(measure).heading}")
            axes.grid(alpha=0.3, axis="y")
        labels = [label for label in report.labels() if any(key[2] == label for key in rounds)]
        handles = [Patch(color=_colour(report, label)) for label in labels]
        figure.legend(handles, labels, loc="upper center", ncols=max(1, len(labels)), frameon=False)
        figure.text(0.5, 0.005, _caption(report), ha="center", fontsize=7, color="0.4")
        figure.tight_layout(rect=(0, 0.04, 1, 1 - 0.35 / (3.1 * rows + 0.9)))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_lines(axes: Axes, report: BenchReport, rounds: Rounds, scenario: str, measure: str) -> None:
    cases = report.cases(scenario)
    least = math.inf
    for label in report.labels():
        points = [
            (int(case), figure) for case in cases if (figure := rounds.figure(scenario, case, label, measure))
        ]
        users = [users for users, _ in points]
        least = min([least, *(figure.least for _, figure in points)])
        colour = _colour(report, label)
        axes.plot(users, [figure.median for _, figure in points], marker="o", markersize=4, color=colour)
        axes.fill_between(
            users, [f.least for _, f in points], [f.greatest for _, f in points], alpha=0.2, color=colour
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(case) for case in cases], cases)
    axes.set_xlabel(scenario)
    if measure.endswith("_ms") and least > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, report: BenchReport, rounds: Rounds, scenario: str, measure: str) -> None:
    """Bars of targets, grouped by case."""
    figures: dict[tuple[str, str], Figure] = {
        (case, label): figure
        for case in report.cases(scenario)
        for label in report.labels()
        if (figure := rounds.figure(scenario, case, label, measure))
    }
    cases = list(dict.fromkeys(case for case, _ in figures))
    labels = [label for label in report.labels() if any(key[1] == label for key in figures)]
    width = 0.8 / len(labels)
    for (case, label), figure in figures.items():
        x = cases.index(case) + (labels.index(label) - (len(labels) - 1) / 2) * width
        whiskers = [[figure.median - figure.least], [figure.greatest - figure.median]]
        axes.bar(
            x, figure.median, width * 0.92, yerr=whiskers, color=_colour(report, label), error_kw={"lw": 0.8}
        )
    axes.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases])
    axes.set_xlim(-0.6, len(cases) - 0.4)


def _colour(report: BenchReport, label: str) -> str:
    return f"C{report.labels().index(label)}"


def _caption(report: BenchReport) -> str:
    machine, versions = report.machine, report.versions
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("zmqengine", "mlx", "mlx-lm") if name in versions
    )
    return f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores; {packages}\n{model_line(report)}"
