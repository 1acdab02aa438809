"""Reports with given figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zmqengine.bench.reports.report import BenchReport, Cell, ModelFacts, TargetFacts


def report_of(
    figures: Mapping[str, Sequence[float]],
    *,
    base: str = "",
    cases: Sequence[str] = ("8",),
    measure: str = "tokens_per_s",
    scenario: str = "users",
    random_weights: bool = False,
) -> BenchReport:
    """`figures` are one measure of a scenario, by target, round by round."""
    return BenchReport(
        kind="serve",
        started_at="2026-01-02T03:04:05+00:00",
        command=["zmqengine", "bench", "serve"],
        machine={"cpu": "abacus", "cores": "2", "system": "desk"},
        versions={"python": "3.11.0"},
        model=ModelFacts(name="m", parameters=1000, random_weights=random_weights),
        options={},
        base=base or next(iter(figures)),
        targets=[TargetFacts(label=label, kind="http") for label in figures],
        cells=[
            Cell(scenario=scenario, case=case, target=label, round=number, measures={measure: value})
            for case in cases
            for label, values in figures.items()
            for number, value in enumerate(values)
        ],
    )
