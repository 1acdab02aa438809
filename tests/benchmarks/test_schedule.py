"""The order of service replayed without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy
import pytest
from click.testing import CliRunner

from benchmarks.schedule.__main__ import schedule
from benchmarks.schedule.arrivals import TracedRequest, generate, read_requests, write_requests
from benchmarks.schedule.evenness import Evenness, jain
from benchmarks.schedule.lines import FirstComeFirstServed
from benchmarks.schedule.machine import Machine
from benchmarks.schedule.options import SMALL, ScheduleOptions
from benchmarks.schedule.replay import Outcome, Replay, Totals
from benchmarks.schedule.run import LINES, MODEST, waits_by_case
from zmqengine.bench.reports.report import load
from zmqengine.bench.targets.target import TargetError
from zmqengine.cli.commands.bench import bench
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import ServiceOrder


def with_sizes(**sizes: float) -> ScheduleOptions:
    return msgspec.convert({**msgspec.to_builtins(SMALL), **sizes}, ScheduleOptions)


def replayed(
    label: str, options: ScheduleOptions, requests: list[TracedRequest] | None = None, *, seed: int = 1
) -> tuple[list[Outcome], Totals]:
    machine = Machine(options)
    return Replay(options, machine, LINES[label][1]()).run(requests or generate(options, machine, seed))


@pytest.mark.parametrize("label", list(LINES))
def test_every_request_is_served_once_whatever_the_order(label: str) -> None:
    """All tokens are made, nobody starts before it came, and the KV cache never holds more than there is."""
    options = with_sizes(kv_tokens=9_000, parked_tokens=2_000, growth_tokens=1)
    requests = generate(options, Machine(options), 3)
    outcomes, totals = replayed(label, options, requests)
    assert sorted(id(outcome.request) for outcome in outcomes) == sorted(id(request) for request in requests)
    assert totals.made_tokens == sum(request.output_tokens for request in requests)
    assert totals.parked > 0
    assert totals.reread_tokens > 0
    assert all(0 <= outcome.wait_s <= outcome.total_s for outcome in outcomes)
    largest = max(request.prompt_tokens + request.output_tokens for request in requests)
    assert totals.kv_tokens_max <= max(options.kv_tokens, largest)


def test_a_replay_says_the_same_again() -> None:
    """No clock and no chance but the seed's."""
    assert replayed("fair", SMALL) == replayed("fair", SMALL)
    assert replayed("fair", SMALL) != replayed("fair", SMALL, seed=2)


def test_fairness_keeps_small_askers_from_waiting_behind_floods() -> None:
    """Of the normal class, those who ask for less than the mean wait a fraction; first come makes all wait alike."""
    p99 = {
        label: float(numpy.percentile(waits_by_case(replayed(label, SMALL)[0])[MODEST], 99))
        for label in LINES
    }
    assert p99["fair"] < p99["priority"] / 3
    assert p99["fair"] < p99["first come"] / 3


def saturating(flows: int, each: int) -> list[TracedRequest]:
    """All there from the start, by flow; prompts of 16 to 1,024 tokens."""
    return [
        TracedRequest(arrival_s=0.0, prompt_tokens=16 << (flow % 7), output_tokens=40, session=f"flow {flow}")
        for flow in range(flows)
        for _ in range(each)
    ]


def test_saturating_front_ends_of_unlike_prompts_are_served_alike() -> None:
    """Jain's index over the cost served in each window while all of them wait."""
    options = with_sizes(window_s=20.0, kv_tokens=100_000)
    fair, first_come = (replayed(label, options, saturating(8, 200))[1] for label in ("fair", "first come"))
    assert fair.jain is not None
    assert fair.jain >= 0.99
    assert first_come.jain is not None
    assert first_come.jain < 0.7


def test_batch_work_goes_on_under_endless_interactive_work() -> None:
    """Strict priorities serve it when all else is done; turns by ageing serve it meanwhile."""
    interactive = [
        TracedRequest(
            arrival_s=number * 0.1, prompt_tokens=20, output_tokens=100, session="chat", priority=-1
        )
        for number in range(2_000)
    ]
    batch = [
        TracedRequest(arrival_s=20.0, prompt_tokens=20, output_tokens=20, session="job", priority=1)
        for _ in range(50)
    ]
    waits_s = {}
    for label in ("fair", "priority"):
        outcomes, _ = replayed(label, SMALL, sorted(interactive + batch, key=lambda one: one.arrival_s))
        waits_s[label] = sorted(one.wait_s for one in outcomes if one.request.session == "job")
    assert waits_s["fair"][12] < 70
    assert waits_s["priority"][12] > 200


def test_jains_index() -> None:
    """1 for equals, 1/n where one has all."""
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_only_those_who_wait_all_through_a_window_are_compared() -> None:
    """Who had nothing waiting at some moment could not be given more."""
    evenness = Evenness(10.0)
    one, two, idle = (Ticket(flow, 1.0, 0, 1, 1, number, 0.0) for number, flow in enumerate("abc"))
    for ticket in (one, two, idle):
        evenness.joined(ticket)
    evenness.look(10.0)
    evenness.left(idle)
    evenness.served(one, 3.0)
    evenness.served(two, 1.0)
    evenness.served(idle, 1000.0)
    evenness.look(15.0)
    assert evenness.index() is None
    evenness.look(20.0)
    assert evenness.index() == pytest.approx(0.8)


def test_a_trace_is_json_lines_or_csv(tmp_path: Path) -> None:
    """Session and priority may be left out; what was made can be kept and read again."""
    (tmp_path / "a.jsonl").write_text(
        '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 4}\n'
        '{"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 8, "session": "x", "priority": -1, "more": 1}\n'
    )
    (tmp_path / "a.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,session,priority\n1.5,10,4,,0\n0.5,20,8,x,-1\n"
    )
    expected = [
        TracedRequest(arrival_s=0.5, prompt_tokens=20, output_tokens=8, session="x", priority=-1),
        TracedRequest(arrival_s=1.5, prompt_tokens=10, output_tokens=4),
    ]
    assert read_requests(tmp_path / "a.jsonl") == expected
    assert read_requests(tmp_path / "a.csv") == expected
    made = generate(SMALL, Machine(SMALL), 1)
    write_requests(made, tmp_path / "made.jsonl")
    assert read_requests(tmp_path / "made.jsonl") == made


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "nonsense", '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    """With its number and the file's name; an empty file says what it needs."""
    path = tmp_path / "broken.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(TargetError, match=r"broken\.jsonl: request 2"):
        read_requests(path)
    path.write_text("")
    with pytest.raises(TargetError, match="has no requests"):
        read_requests(path)


def test_parked_for_nobody_and_by_nobody_where_first_come_is_first_served() -> None:
    """What the order of service is compared with displaces no one."""
    line = FirstComeFirstServed(by_priority=True)
    rows = [Ticket("a", 1.0, priority, 1, 1, number, 0.0) for number, priority in enumerate((1, 1, 0))]
    assert line.victim(rows, for_=Ticket("b", 1.0, -1, 1, 1, 9, 0.0)) is None
    assert line.victim(rows) is rows[1]


def test_it_is_typed_and_leaves_a_report(tmp_path: Path) -> None:
    """Tables of waits by class and of the service, a report that is shown again, and a picture."""
    report_path, trace, picture = tmp_path / "r.json", tmp_path / "t.jsonl", tmp_path / "p.svg"
    words = ["--size", "small", "--rounds", "2", "--set", "operations_waiting=100"]
    words += ["--out", str(report_path), "--keep-trace", str(trace), "--plot", str(picture)]
    result = CliRunner().invoke(schedule, words)
    assert result.exit_code == 0, result.output
    assert "Jain's index" in result.stdout
    report = load(report_path)
    assert report.kind == "schedule"
    assert report.labels() == list(LINES)
    assert report.cases("schedule") == ["interactive", "normal", "batch", MODEST]
    counted = {cell.target: cell.measures["requests"] for cell in report.cells if cell.scenario == "service"}
    assert counted == dict.fromkeys(LINES, 1500)
    calls = [cell.measures for cell in report.cells if cell.scenario == "calls" and cell.target == "fair"]
    assert all(measures["charge_us"] > 0 for measures in calls)
    assert picture.stat().st_size > 1000
    assert CliRunner().invoke(bench, ["show", str(report_path)]).exit_code == 0
    again = CliRunner().invoke(schedule, ["--trace", str(trace), "--set", "operations_waiting=100"])
    assert again.exit_code == 0, again.output


@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_the_full_size_keeps_its_promises() -> None:
    """1,000 front-ends and 100,000 requests, or `ZMQENGINE_REPLAYED`: waits of each class, and no flow starves."""
    options = ScheduleOptions(requests=int(os.environ.get("ZMQENGINE_REPLAYED", "100000")))
    machine = Machine(options)
    order = ServiceOrder(queue_max=1 << 60)
    requests = generate(options, machine, 1)
    outcomes, totals = Replay(options, machine, order).run(requests)
    assert len(outcomes) == options.requests
    assert totals.jain is not None
    assert totals.jain >= 0.99
    cases = waits_by_case(outcomes)
    assert max(cases["interactive"]) < 10
    assert numpy.percentile(cases[MODEST], 99) < 60
    assert order.aged_starts > 0
    assert len(order) == 0
