"""`benchmarks.overhead` in small, on the bundled model: the bare generator, a real worker, real client processes."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.overhead import BARE, OverheadOptions, OverheadPlan, overhead
from zmqengine.bench.reports.report import BenchReport, Rounds, errors_of

OPTIONS = OverheadOptions(
    streams=(1, 4),
    processes=2,
    prompt_tokens=16,
    max_tokens=8,
    requests_min=4,
    requests_per_stream=1,
    burst=6,
    burst_max_tokens=4,
    arrivals=2,
    idle_s=1.0,
)
WORKER = "zmqengine"

# Everything is run once, in the fixture, and a shared machine may be slow.
pytestmark = [pytest.mark.weekly, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def report() -> BenchReport:
    plan = OverheadPlan(model="pico", options=OPTIONS, rounds=1, seed=3)
    return asyncio.run(overhead(plan, on_progress=lambda text: None))


def test_worker_and_bare_generator_make_the_same_tokens_in_turn(report: BenchReport) -> None:
    """Same prompts, same lengths, round by round; the bare generator is the base of every ratio."""
    assert errors_of(report.cells) == []
    assert report.base == BARE
    cells = [cell for cell in report.cells if cell.scenario == "overhead"]
    assert [cell.target for cell in cells] == [BARE, WORKER] * (len(cells) // 2)
    assert [cell.case for cell in cells[::2]] == [
        "1 stream",
        "4 streams",
        "4 streams, 2 clients",
        "6 at once",
    ]
    for cell in cells:
        at_once = cell.case == "6 at once"
        assert cell.measures["tokens"] == (6 * 4 if at_once else 4 * OPTIONS.max_tokens)
        assert cell.measures["server_cpu_per_token_us"] > 0
    figure = Rounds(report).figure("overhead", "4 streams", WORKER, "tokens_per_s")
    assert figure is not None
    assert figure.ratio is not None


def test_the_time_of_a_pass_outside_the_engine_is_told(report: BenchReport) -> None:
    """And what server and clients cost in processor time."""
    for cell in report.cells:
        if cell.scenario == "overhead" and cell.target == WORKER:
            assert cell.measures["pass_outside_us_p50"] > 0
            assert cell.measures["client_cpu_cores"] > 0
            assert cell.measures["client_cpu_per_token_us"] > 0
            # There is no front-end between the worker and these clients.
            assert "front_end_cpu_per_token_us" not in cell.measures


def test_a_request_that_arrives_while_three_decode_starts_with_the_next_pass(report: BenchReport) -> None:
    """smg #1427 B, mlx_lm.server: nobody waits for a batch to end or for a timer."""
    (cell,) = [cell for cell in report.cells if cell.scenario == "admission"]
    # None, where a busy machine has let the others end before.
    assert cell.measures["admission_wait_passes_max"] <= 1


def test_an_idle_worker_does_not_spin(report: BenchReport) -> None:
    """With a session open. It uses next to nothing; one that spins gets its share of even a busy machine."""
    (cell,) = [cell for cell in report.cells if cell.scenario == "idle"]
    assert 0 <= cell.measures["idle_cpu_percent"] < 15
