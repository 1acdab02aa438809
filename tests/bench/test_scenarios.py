"""Every scenario in small, against real worker processes and a real HTTP front-end, on the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from zmqengine.bench.options import SMALL, ScenarioOptions
from zmqengine.bench.reports.plot import plot
from zmqengine.bench.reports.report import BenchReport, Rounds, errors_of, load, save
from zmqengine.bench.reports.tables import tables_of
from zmqengine.bench.scenarios import SCENARIO_NAMES, scenario_named
from zmqengine.bench.serve import ServePlan, serve
from zmqengine.bench.servers.started import StartPlan
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

WORKER, HTTP = "zmqengine", "zmqengine http"
ENGINE = FakeEngineConfig(step_ms=1.0, context_tokens=8192, prefill_chunk=64, rows_max=SMALL.slots)

# Everything is run once, in the fixture, and a shared machine may be slow.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def report() -> BenchReport:
    start = StartPlan(model="fake", engine=f"fake:{ENGINE.to_json()}", http=1, second=True, slots=SMALL.slots)
    plan = ServePlan(scenarios=tuple(SCENARIO_NAMES), start=start, options=SMALL, rounds=1, seed=7)
    return asyncio.run(serve(plan, on_progress=lambda text: None))


def test_every_scenario_runs_against_a_real_worker_and_a_real_http_front_end(report: BenchReport) -> None:
    """Nothing fails and no request ends in an error."""
    assert errors_of(report.cells) == []
    measured = {(cell.scenario, cell.target) for cell in report.cells}
    assert measured == {(name, target) for name in SCENARIO_NAMES for target in (WORKER, HTTP)}
    assert [cell for cell in report.cells if cell.measures.get("errors")] == []


@pytest.mark.parametrize(
    "scenario", ["users", "burst", "overload", "trace", "agents", "prefix", "front-ends"]
)
def test_every_token_asked_for_arrives(report: BenchReport, scenario: str) -> None:
    """smg bench: "stalls at 16 users"; here all requests complete, and the tokens are exactly those asked for."""
    for cell in report.cells:
        if cell.scenario == scenario:
            assert cell.measures["completed"] == cell.measures["requests"], cell
    for cell in report.cells:
        if cell.scenario == scenario == "users":
            assert cell.measures["tokens"] == cell.measures["requests"] * SMALL.max_tokens


def test_users_are_measured_as_earlier_reports_did(report: BenchReport) -> None:
    """vllm-mlx #8: 1, 2, 4, 8 users with throughput, wall clock, TTFT min and max."""
    cells = [cell for cell in report.cells if cell.scenario == "users"]
    for cell in cells:
        told = cell.measures
        assert 0 < told["ttft_min_ms"] <= told["ttft_max_ms"] <= told["wall_s"] * 1000
        assert told["tokens_per_s"] == pytest.approx(told["tokens"] / told["wall_s"], rel=0.05)
    assert {"1", "2", "4", "8", "16", "64"} <= set(scenario_named("users").cases(ScenarioOptions()))


def test_the_staggered_burst_has_its_figures(report: BenchReport) -> None:
    """smg #1427 B: 4 users who drift out of phase; nobody waits for a batch to drain."""
    for cell in report.cells:
        if cell.scenario == "burst":
            assert cell.case.startswith("4 users")
            assert 0 < cell.measures["ttft_p50_ms"] <= cell.measures["ttft_max_ms"]
            assert cell.measures["itl_max_ms"] > 0


def test_two_models_run_together_and_in_turn(report: BenchReport) -> None:
    """omlx #1304: two engines at once; both ways took their time, and the ratio is told."""
    for cell in report.cells:
        if cell.scenario == "two-models":
            measures = cell.measures
            assert min(measures["in_turn_s"], measures["together_s"]) > 0
            assert measures["speedup"] == pytest.approx(
                measures["in_turn_s"] / measures["together_s"], rel=1e-4
            )


def test_slots_freed_by_cancelling_go_to_those_who_wait(report: BenchReport) -> None:
    """The queued requests got their first token only after others were left, and the survivors every token."""
    for cell in report.cells:
        if cell.scenario == "cancel" and cell.case.startswith("half"):
            assert cell.measures["slot_free_p50_ms"] > 0
            assert cell.measures["survivors_complete"] == SMALL.slots / 2


def test_the_long_prompt_and_the_streams_beside_it_are_told_apart(report: BenchReport) -> None:
    """Gaps before it came, the longest silence while it waited, and its own TTFT."""
    for cell in report.cells:
        if cell.scenario == "interference":
            assert 0 <= cell.measures["itl_before_p50_ms"] <= cell.measures["silence_max_ms"]
            assert cell.measures["ttft_long_ms"] > 0


def test_slow_and_stopped_front_ends_get_every_token(report: BenchReport) -> None:
    """Processes that the system stopped for a while lose nothing."""
    cells = [c for c in report.cells if c.scenario == "front-ends" and "hindered" in c.case]
    assert cells
    for cell in cells:
        assert cell.measures["hindered_complete"] == cell.measures["hindered_requests"] > 0


def test_the_cost_to_the_server_is_measured(report: BenchReport) -> None:
    """Processor time and memory of its processes, and its passes."""
    for cell in report.cells:
        assert cell.measures["server_memory_bytes"] > 1_000_000
        assert "server_cpu_cores" in cell.measures
        assert "passes" in cell.measures
    assert any(cell.measures["passes"] > 0 for cell in report.cells)


def test_the_report_of_a_run_is_kept_shown_and_drawn(report: BenchReport, tmp_path: Path) -> None:
    """The whole way from a run to a picture."""
    save(report, tmp_path / "report.json")
    plot(report, tmp_path / "report.svg")
    assert {table.title.split(":")[0] for table in tables_of(load(tmp_path / "report.json"))} == set(
        SCENARIO_NAMES
    )
    figure = Rounds(report).figure("users", "4", HTTP, "tokens_per_s")
    assert figure is not None
    assert figure.ratio is not None
    assert report.command
    assert report.versions["zmqengine"]
