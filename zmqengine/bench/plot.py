"""A report as a picture, PNG or SVG by the name of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

from zmqengine.bench.measures import kind_of
from zmqengine.bench.report import Figure, Report, Rounds
from zmqengine.bench.tables import preface

matplotlib.use("agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = (
    ("users", "tokens_per_s"),
    ("users", "ttft_p50_ms"),
    ("users", "ttft_max_ms"),
    ("users", "itl_p99_ms"),
)
BARS = (
    ("overhead", "tokens_per_s"),
    ("burst", "ttft_max_ms"),
    ("interference", "silence_max_ms"),
    ("prefix", "ttft_later_p50_ms"),
    ("overload", "completed"),
    ("cancel", "ttft_next_ms"),
    ("agents", "ttft_later_p50_ms"),
    ("front-ends", "tokens_per_s"),
)
PANELS_PER_ROW = 3


def plot(report: Report, path: Path) -> None:
    """Draw what the report has of the usual panels: lines over users, bars for the rest."""
    rounds = Rounds(report)
    measured = {(scenario, measure) for scenario, _, _, measure in rounds}
    lines = [panel for panel in LINES if panel in measured]
    bars = [panel for panel in BARS if panel in measured]
    count = max(1, len(lines) + len(bars))
    rows = -(-count // PANELS_PER_ROW)
    columns = min(count, PANELS_PER_ROW)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows + 0.6), squeeze=False)
    panels = list(grid.flat)
    for axes, (scenario, measure) in zip(panels, lines, strict=False):
        _draw_lines(axes, report, rounds, scenario, measure)
    for axes, (scenario, measure) in zip(panels[len(lines) :], bars, strict=False):
        _draw_bars(axes, report, rounds, scenario, measure)
    for axes in panels[len(lines) + len(bars) :]:
        axes.set_visible(False)
    figure.suptitle("\n".join(preface(report)[:2]), fontsize=8, wrap=True)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date, so that the same report makes the same file.
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_lines(axes: Axes, report: Report, rounds: Rounds, scenario: str, measure: str) -> None:
    for number, label in enumerate(report.labels()):
        points = [
            (int(case), figure)
            for case in report.cases(scenario)
            if (figure := rounds.figure(scenario, case, label, measure))
        ]
        if not points:
            continue
        colour = f"C{number}"
        users = [users for users, _ in points]
        axes.plot(users, [figure.median for _, figure in points], marker="o", label=label, color=colour)
        axes.fill_between(
            users, [f.least for _, f in points], [f.greatest for _, f in points], alpha=0.2, color=colour
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [int(case) for case in report.cases(scenario)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(scenario)
    axes.set_title(f"{scenario}: {kind_of(measure).heading}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_bars(axes: Axes, report: Report, rounds: Rounds, scenario: str, measure: str) -> None:
    bars: list[tuple[str, str, int, Figure]] = [
        (case, label, number, figure)
        for case in report.cases(scenario)
        for number, label in enumerate(report.labels())
        if (figure := rounds.figure(scenario, case, label, measure))
    ]
    several = len(report.cases(scenario)) > 1
    names = [f"{label}\n{case}" if several else label for case, label, _, _ in bars]
    medians = [figure.median for *_, figure in bars]
    errors: Sequence[Sequence[float]] = (
        [figure.median - figure.least for *_, figure in bars],
        [figure.greatest - figure.median for *_, figure in bars],
    )
    axes.barh(range(len(bars)), medians, xerr=errors, color=[f"C{n}" for _, _, n, _ in bars], height=0.7)
    axes.set_yticks(range(len(bars)), names, fontsize=6 if several else 8)
    axes.invert_yaxis()
    title = scenario if several else f"{scenario}: {report.cases(scenario)[0]}"
    axes.set_title(f"{title}\n{kind_of(measure).heading}", fontsize=9)
    axes.grid(alpha=0.3, axis="x")
