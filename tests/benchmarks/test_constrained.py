"""`benchmarks.constrained` in small: a real worker, free and constrained requests in turn."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.constrained import (
    FREE,
    HOSTILE,
    NEW,
    SEEN,
    ConstrainedOptions,
    ConstrainedPlan,
    constrained,
)
from zmqengine.bench.reports.report import BenchReport, Rounds, errors_of
from zmqengine.bench.reports.tables import tables_of

OPTIONS = ConstrainedOptions(
    rows=4, requests_per_row=1, prompt_tokens=8, max_tokens=24, firsts=2, hostiles=1, http_rows=2
)

# Everything is run once, in the fixture, and a shared machine may be slow.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def report() -> BenchReport:
    plan = ConstrainedPlan(shapes=("0.2m",), http=True, options=OPTIONS, rounds=1, seed=3)
    return asyncio.run(constrained(plan, on_progress=lambda text: None))


def test_free_and_constrained_rows_do_the_same_work(report: BenchReport) -> None:
    """As many tokens, from the same worker, so that the ratio says what the constraint costs."""
    assert errors_of(report.cells) == []
    for scenario, tokens in (("all rows", 4 * 24), ("half of the rows", 2 * 24)):
        cells = [cell for cell in report.cells if cell.scenario == scenario]
        assert {cell.target for cell in cells} == {FREE, SEEN}
        assert {cell.measures["tokens"] for cell in cells} == {tokens}
        figure = Rounds(report).figure(scenario, "0.2m", SEEN, "tokens_per_s")
        assert figure is not None
        assert figure.ratio is not None


def test_first_tokens_and_hostile_neighbours_are_timed(report: BenchReport) -> None:
    """Of a schema that was seen and of new ones; and whatever comes beside it, an honest stream goes on."""
    firsts = [cell for cell in report.cells if cell.scenario == "first token"]
    assert [cell.target for cell in firsts] == [FREE, SEEN, NEW]
    assert all(cell.measures["ttft_p50_ms"] > 0 for cell in firsts)
    hostile = [cell for cell in report.cells if cell.scenario == "hostile"]
    assert len(hostile) == len(HOSTILE)
    assert all(cell.measures["silence_max_ms"] > 0 for cell in hostile)


def test_the_json_mode_of_a_server_is_measured_beside(report: BenchReport) -> None:
    """Over HTTP, with the same schema; the tables have a place for everything."""
    over_http = [cell for cell in report.cells if cell.scenario == "JSON mode over HTTP"]
    assert [(cell.case, cell.measures["completed"]) for cell in over_http] == [(FREE, 2), (SEEN, 2)]
    assert len({table.title for table in tables_of(report)}) == 5
