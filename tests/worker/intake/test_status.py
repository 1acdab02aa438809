"""What `status` tells of a run whose every time is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.workers import WorkerProcess, wait_until
from tests.worker.harness import Harness
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
from zmqengine.errors import ZmqEngineError
from zmqengine.protocol import messages
from zmqengine.protocol.messages import RequestInfo
from zmqengine.worker.open_engine import warm_up
from zmqengine.worker.telemetry.counters import Counters
from zmqengine.worker.telemetry.latencies import SECONDS, RunningHistogram
from zmqengine.worker.telemetry.metrics import prometheus, status

HOUR_MS = 3_600_000


Make = Callable[..., Harness]


@pytest.fixture
def harness(make_harness: Make) -> Harness:
    """One row; leases outlast what the clock is turned by."""
    return make_harness(FakeEngineConfig(rows_max=1), lease_ms=HOUR_MS)


def counted(histogram: messages.Histogram) -> dict[float, int]:
    """How many values each bound holds, without the empty ones."""
    bounds = [*histogram.bounds, float("inf")]
    return {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count}


def run_slowly(harness: Harness) -> list[messages.End]:
    """Two requests on one row, with minutes of a fake clock between steps; returns their ends."""
    front_end = harness.front_end()
    front_end.accepted("first", max_tokens=3)
    harness.clock.advance(30)
    front_end.accepted("second", max_tokens=2)
    for seconds in (60, 60, 120, 120):
        harness.clock.advance(seconds)
        harness.pass_()
    return front_end.wait_for_end("first", "second")


def test_a_histogram_counts_a_value_on_a_bound_within_it() -> None:
    """As `le` of Prometheus has it: lower or equal."""
    histogram = RunningHistogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(1.25, times=3)
    assert (histogram.counts, histogram.sum) == ([2, 5, 1], 10.75)
    assert list(SECONDS) == sorted(SECONDS)


def test_the_times_of_requests_are_counted_where_they_belong(harness: Harness) -> None:
    """Minutes of a fake clock pass between steps, so that no real delay moves a value."""
    run_slowly(harness)
    histograms = harness.actor.counters.latencies.snapshot()
    # first: read at 0, tokens at 30, 90, 150. second: accepted at 30, admitted at 270, tokens at 390 and soon after.
    assert counted(histograms["queue_s"]) == {0.001: 1, 250.0: 1}
    assert histograms["queue_s"].sum == pytest.approx(240, abs=20)
    assert counted(histograms["time_to_first_token_s"]) == {50.0: 1, 1000.0: 1}
    assert histograms["time_to_first_token_s"].sum == pytest.approx(30 + 360, abs=20)
    assert counted(histograms["prefill_s"]) == {50.0: 1, 250.0: 1}
    assert sum(histograms["inter_token_s"].counts) == 3
    assert counted(histograms["inter_token_s"])[100.0] == 2
    assert sum(histograms["request_s"].counts) == 2
    assert counted(histograms["prompt_tokens"]) == {5.0: 2}
    assert counted(histograms["output_tokens"]) == {2.0: 1, 5.0: 1}
    assert sum(histograms["step_s"].counts) == harness.engine.stats().steps


def test_rows_of_one_step_are_counted_each(make_harness: Make) -> None:
    """Eight rows that step together give eight gaps a step."""
    harness = make_harness(lease_ms=HOUR_MS)
    front_end = harness.front_end()
    for number in range(8):
        front_end.send(front_end.insert_message(f"r{number}", max_tokens=4))
    harness.read_commands(8)
    front_end.wait_for_end(*(f"r{number}" for number in range(8)))
    histograms = harness.actor.counters.latencies.snapshot()
    assert sum(histograms["time_to_first_token_s"].counts) == 8
    assert sum(histograms["inter_token_s"].counts) == 8 * 3


def test_requests_and_sessions_are_listed_by_name(harness: Harness) -> None:
    """What runs, then what waits and why."""
    front_end = harness.front_end()
    front_end.accepted("runs", max_tokens=50)
    front_end.accepted("waits", max_tokens=5, priority=3)
    harness.clock.advance(1)
    harness.pass_()
    listed = status(harness.shared_status, 0)
    assert front_end.welcome is not None
    session = front_end.welcome.session
    runs, waits = listed.requests
    assert (runs.request, runs.phase, runs.waits_for, runs.session) == ("runs", "decode", "", session)
    assert (runs.prompt_tokens, runs.prefilled_tokens, runs.max_tokens) == (3, 3, 50)
    assert runs.output_tokens >= 1
    assert waits == RequestInfo(
        "waits", session, "queued", "row", age_s=1.0, prompt_tokens=3, max_tokens=5, priority=3
    )
    (info,) = listed.sessions
    assert (info.id, info.client, info.running, info.waiting, info.held) == (session, "test", 1, 1, 2)


def test_steps_and_tokens_of_the_warm_up_are_not_counted(make_harness: Make) -> None:
    """A worker without a request has made no token; after one, its tokens alone."""
    engine = FakeEngine()
    warm_up(engine)
    harness = make_harness(engine)
    names = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens")

    def numbers() -> list[float]:
        told = status(harness.shared_status, 0).numbers
        return [told[name] for name in names]

    assert numbers() == [0, 0, 0, 0]
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=2)
    front_end.wait_for_end("r")
    harness.clock.advance(1)
    harness.pass_()
    steps, prompt_tokens, cached_tokens, generated_tokens = numbers()
    assert steps > 0
    assert (prompt_tokens + cached_tokens, generated_tokens) == (3, 2)


def test_prometheus_is_told_of_every_counter_that_it_is_one(harness: Harness) -> None:
    """As `rate()` of a gauge is wrong after a restart."""
    told = prometheus(harness.shared_status)
    # The maximum of a life is no sum.
    names = Counters().numbers().keys() - {"admission_wait_passes_max"}
    assert "vectors" in names
    for name in names:
        assert f"# TYPE zmqengine_{name} counter" in told, name


def test_what_does_not_fit_waits_for_memory_and_the_next_for_its_turn(make_harness: Make) -> None:
    """The reason is that of the line, not of the request alone."""
    harness = make_harness(
        FakeEngineConfig(kv_bytes_token=1), memory_limit_bytes=112, growth_tokens=80, lease_ms=HOUR_MS
    )
    front_end = harness.front_end()
    front_end.accepted("runs", max_tokens=80)
    front_end.accepted("large", max_tokens=80)
    front_end.accepted("small", max_tokens=2)
    harness.clock.advance(1)
    harness.pass_()
    reasons = {info.request: info.waits_for for info in status(harness.shared_status, 0).requests}
    assert (reasons["runs"], reasons["large"]) == ("", "memory")
    assert reasons["small"].startswith("turn: ")


def test_an_operator_ends_a_request_of_any_session(harness: Harness) -> None:
    """It gets the terminal answer of an abort, once; a request that is not there is no error."""
    front_end, other = harness.front_end(), harness.front_end()
    front_end.accepted("r", max_tokens=2000)
    other.accepted("r", max_tokens=2000)
    assert front_end.welcome is not None
    harness.shared_status.ask_to_end(front_end.welcome.session, "r")
    harness.shared_status.ask_to_end(front_end.welcome.session, "no such")
    harness.shared_status.ask_to_end("nobody", "r")
    (end,) = front_end.wait_for_end("r")
    assert (end.finish, end.message) == ("abort", "an operator ended this request")
    harness.shared_status.ask_to_end(front_end.welcome.session, "r")
    harness.passes(3)
    assert harness.actor.counters.ended["abort"] == 1
    assert "r" not in other.ends
    assert harness.actor.batch.has_work


def test_a_restarted_worker_says_how_often() -> None:
    """The supervisor counts for it: its own memory ended with it."""
    with WorkerProcess() as worker, worker.client() as client:
        client.wait_ready()
        assert client.status().numbers["restarts"] == 0
        worker.kill_engine()

        def restarts() -> float:
            try:
                return client.status().numbers["restarts"]
            except ZmqEngineError:
                return 0

        wait_until(lambda: restarts() == 1, "the worker did not come back")


def test_memory_is_told_by_part(harness: Harness) -> None:
    """The parts of what the engine holds, and the limit."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=50)
    harness.clock.advance(1)
    harness.pass_()
    memory = status(harness.shared_status, 0).memory
    assert {"weights", "kv", "prompt_cache", "buffers", "workspace", "limit"} <= set(memory)
    assert memory["kv"] == harness.engine.memory().kv > 0


def test_the_end_of_a_request_says_how_long_each_phase_was(harness: Harness) -> None:
    """Until its row, until its first token, until its end."""
    first, second = run_slowly(harness)
    assert [first.queue_ms, first.prefill_ms, first.decode_ms] == pytest.approx([0, 30e3, 120e3], abs=20e3)
    assert [second.queue_ms, second.prefill_ms] == pytest.approx([240e3, 120e3], abs=20e3)
