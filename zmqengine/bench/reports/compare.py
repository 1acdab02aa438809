"""Comparison of two reports by ratios, with differences within noise marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from zmqengine.bench.load.measures import kind_of
from zmqengine.bench.reports.report import BenchReport, Figure, Rounds
from zmqengine.bench.reports.tables import Table, number_text, shown_measures

Verdict = Literal["better", "worse", "within noise", "changed", "only once"]


class Comparison(NamedTuple):
    """One measure in two reports: `ratio` is second / first, None where the first is 0."""

    scenario: str
    case: str
    target: str
    measure: str
    first: Figure
    second: Figure
    ratio: float | None
    verdict: Verdict


def compare(
    first: BenchReport, second: BenchReport, renamed: Mapping[str, str] | None = None
) -> Iterator[Comparison]:
    """Measures in both reports, in the first one's order. `renamed` maps its targets to those of the second."""
    names = dict(renamed or {})
    before, after = Rounds(first), Rounds(second)
    for scenario, case, target, measure in before:
        one = before.figure(scenario, case, target, measure)
        two = after.figure(scenario, case, names.get(target, target), measure)
        if one is None or two is None:
            continue
        ratio = two.median / one.median if one.median else None
        yield Comparison(scenario, case, target, measure, one, two, ratio, verdict(measure, one, two))


def verdict(measure: str, first: Figure, second: Figure) -> Verdict:
    """Within noise if the ranges over rounds overlap; "only once" for fewer than two rounds."""
    if min(first.rounds, second.rounds) < 2:
        return "only once"
    if first.least <= second.greatest and second.least <= first.greatest:
        return "within noise"
    better = kind_of(measure).better
    if not better:
        return "changed"
    return "better" if (second.median > first.median) == (better == "higher") else "worse"


def comparison_table(comparisons: Iterator[Comparison], *, everything: bool = False) -> Table:
    """A table of the shown measures of each scenario, or of all with `everything`."""
    rows = [
        [
            f"{c.scenario}, {c.case}, {c.target}",
            kind_of(c.measure).heading,
            number_text(c.first.median),
            number_text(c.second.median),
            "-" if c.ratio is None else f"x{c.ratio:.2f}",
            c.verdict,
        ]
        for c in comparisons
        if everything or c.measure in shown_measures(c.scenario)
    ]
    return Table("second against first", ["", "measure", "first", "second", "ratio", "verdict"], rows)
