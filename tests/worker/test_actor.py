"""The loop: admission, steps, terminal answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.support.workers import wait_until
from tests.worker.harness import Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.interface import RowFailure, RowPrefill, RowToken, StepResult
from zmqengine.protocol.messages import Accepted, Done, Fatal, Rejected, Watermark
from zmqengine.worker.actor import PassReport
from zmqengine.worker.idle import REST_S

Make = Callable[..., Harness]


def test_a_request_streams_exactly_what_the_engine_makes(harness: Harness) -> None:
    """Tokens arrive in order, without a gap, and end once."""
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=20)
    assert isinstance(front_end.call(insert), Accepted)
    (end,) = front_end.wait_for_end("r")
    assert end.finish == "length"
    assert end.prompt_tokens == 3
    assert front_end.tokens["r"] == expected_tokens(row_of(insert))


def test_a_request_that_arrives_while_others_decode_starts_its_prefill_in_the_next_pass(
    harness: Harness,
) -> None:
    """smg #1427 B: every pass drains all commands, admits, then makes exactly one step."""
    front_end = harness.front_end()
    for name in "abc":
        front_end.accepted(name, max_tokens=500)
    harness.run_until(lambda: harness.engine.stats().rows_decoding == 3)
    steps = harness.engine.stats().steps
    front_end.send(front_end.insert_message("late", max_tokens=500))
    report = harness.pass_with_command()
    assert (report.admitted, report.stepped) == (1, True)
    assert harness.engine.stats().steps == steps + 1
    late = next(r for r in harness.actor.scheduler.running.values() if r.id == "late")
    assert late.prefill_pass - late.arrival_pass + 1 == 1


def test_all_commands_are_read_before_one_step(harness: Harness) -> None:
    """smg #1427 B: 32 inserts that are there together join in one pass and one step."""
    front_end = harness.front_end()
    for index in range(32):
        front_end.send(front_end.insert_message(f"r{index}", max_tokens=4))
    before = harness.engine.stats().steps
    admitted = 0
    while admitted < 32:
        report = harness.pass_with_command()
        admitted += report.admitted
        before += 1
    assert harness.engine.stats().steps == before
    front_end.wait_for_end(*(f"r{index}" for index in range(32)))


def test_the_engine_is_called_on_one_thread_only(harness: Harness) -> None:
    """smg #1427 A: insert, next, remove and close happen on the thread that built the actor."""
    front_end = harness.front_end()
    front_end.accepted("r")
    front_end.accepted("s", max_tokens=500)
    front_end.abort("s")
    front_end.wait_for_end("r", "s")
    calls = list(harness.engine.calls)
    assert {call.method for call in calls} >= {"insert", "next", "remove"}
    assert len({call.thread for call in calls}) == 1


def test_priorities_decide_the_order_of_service(make_harness: Make) -> None:
    """omlx #3047: a priority field that is read. Lower first, equals by arrival."""
    harness = make_harness(FakeEngineConfig(rows_max=1))
    front_end = harness.front_end()
    front_end.send(front_end.insert_message("running", max_tokens=50))
    harness.read_commands(1)
    order = [("late", 50), ("normal", 0), ("urgent", -50), ("normal2", 0), ("urgent2", -50)]
    for name, priority in order:
        front_end.send(front_end.insert_message(name, priority=priority, max_tokens=2))
    harness.read_commands(len(order))
    front_end.wait_for_end(*(name for name, _ in order))
    served = [name for name in front_end.ends if name != "running"]
    assert served == ["urgent", "urgent2", "normal", "normal2", "late"]


def test_a_full_queue_refuses_with_a_hint_and_serves_on(make_harness: Make) -> None:
    """Bounded queue, of which one session fills half: `overloaded` and when to come back."""
    harness = make_harness(FakeEngineConfig(rows_max=1), queue_max=4)
    front_end = harness.front_end()
    for index in range(4):
        front_end.send(front_end.insert_message(f"r{index}", max_tokens=100))
        harness.read_commands(1)
    harness.run_until(lambda: front_end.read() or len(front_end.replies) == 5)
    refused = front_end.replies[-1]
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    assert refused.retry_after_ms is not None
    assert refused.retry_after_ms > 0
    front_end.wait_for_end("r0", "r1", "r2")
    assert "r3" not in front_end.ends


def test_a_deadline_ends_a_request_in_the_queue_and_in_the_batch(make_harness: Make) -> None:
    """mlx-openai-server, measured: bounds, deadlines, leases. Each gets `deadline` once, and the tokens so far."""
    harness = make_harness(FakeEngineConfig(rows_max=1))
    front_end = harness.front_end()
    for name in ("running", "queued"):
        front_end.send(front_end.insert_message(name, max_tokens=4000, deadline_ms=5000))
    harness.read_commands(2)
    harness.passes(5)
    harness.clock.advance(6)
    ends = front_end.wait_for_end("running", "queued")
    assert [end.finish for end in ends] == ["deadline", "deadline"]
    assert len(front_end.tokens["running"]) > 0
    harness.pass_()
    assert harness.engine.stats().rows_decoding == 0


def test_progress_of_a_long_prompt_is_told(make_harness: Make) -> None:
    """lmstudio #1709, omlx #2031: a long prompt is read in bounded chunks, and its front-end sees how far it is."""
    harness = make_harness(FakeEngineConfig(prefill_chunk=100))
    front_end = harness.front_end()
    other = harness.front_end()
    other.accepted("short", max_tokens=400)
    front_end.accepted("long", list(range(1, 951)), max_tokens=2)
    front_end.wait_for_end("long")
    rows = [row for output in front_end.outputs for row in getattr(output, "progress", [])]
    assert [row.total for row in rows] == [950] * len(rows)
    done = [row.done for row in rows]
    assert done == sorted(set(done))
    assert done[-1] == 950
    assert max(b - a for a, b in zip([0, *done], done, strict=False)) <= 100
    # No pass runs now: frames that were sent may not have arrived yet.
    while len(other.tokens.get("short", ())) < len(done) - 1 and other.out.poll(5_000):
        other.read()
    assert len(other.tokens["short"]) >= len(done) - 1


def test_logprobs_travel_with_their_tokens(harness: Harness) -> None:
    """One entry a token when asked for, none otherwise."""
    front_end = harness.front_end()
    front_end.accepted("with", logprobs=3, max_tokens=5)
    front_end.accepted("without", max_tokens=5)
    front_end.wait_for_end("with", "without")
    rows = [
        row for output in front_end.outputs for row in getattr(output, "rows", []) if hasattr(row, "tokens")
    ]
    with_ = [row for row in rows if row.request == "with"]
    assert sum(len(row.logprobs) for row in with_) == 5
    assert all(len(entry.top) == 3 for row in with_ for entry in row.logprobs)
    assert all(row.logprobs is None for row in rows if row.request == "without")


def test_emitted_tokens_are_continued_and_not_repeated(harness: Harness) -> None:
    """After a restart of the worker a stream goes on at the next index."""
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=20)
    whole = expected_tokens(row_of(insert))
    front_end.tokens["r"] = whole[:7]
    accepted = front_end.accepted("r", max_tokens=20, emitted=whole[:7])
    assert accepted.next_index == 7
    front_end.wait_for_end("r")
    assert front_end.tokens["r"] == whole


def test_a_watermark_comes_about_once_a_second(harness: Harness) -> None:
    """A front-end that lost the last frame finds out."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=3)
    front_end.wait_for_end("r")
    # The first one comes with the request itself; count from there.
    harness.run_until(front_end.watermarks)
    seen = len(front_end.watermarks())
    for _ in range(3):
        harness.clock.advance(1.01)
        harness.pass_()
    harness.run_until(lambda: len(front_end.watermarks()) >= seen + 3)
    assert len(front_end.watermarks()) == seen + 3
    last = front_end.watermarks()[-1]
    assert isinstance(last, Watermark)
    assert [(row.request, row.next_index, row.ended) for row in last.rows] == [("r", 3, True)]


def test_an_idle_worker_gives_back_what_it_keeps_for_speed(harness: Harness) -> None:
    """Once, when it has had no work for a while; and again after it has worked."""
    front_end = harness.front_end()

    for times in (1, 2):
        front_end.accepted(f"r{times}", max_tokens=3)
        front_end.wait_for_end(f"r{times}")
        harness.pass_()
        assert harness.released == times - 1
        assert harness.actor._timers.idle_wait_ms() <= 1000 * REST_S
        for _ in range(3):
            harness.clock.advance(REST_S)
            harness.pass_()
        assert harness.released == times


def test_drain_finishes_what_runs_and_answers_the_rest(make_harness: Make) -> None:
    """smg #1427 review: at shutdown every live request gets a terminal answer before the engine closes."""
    harness = make_harness(FakeEngineConfig(rows_max=1))
    front_end = harness.front_end()
    for name in ("running", "queued"):
        front_end.send(front_end.insert_message(name, max_tokens=30))
    harness.read_commands(2)
    harness.shared_status.ask_to_drain()
    ends = front_end.wait_for_end("running", "queued")
    assert [end.finish for end in ends] == ["length", "shutdown"]
    assert front_end.rejected("late").code == "draining"


def test_drain_ends_the_rest_at_its_time_limit(make_harness: Make) -> None:
    """A drain is bounded: past its time limit what runs gets `shutdown`."""
    harness = make_harness(FakeEngineConfig(context_tokens=100_000), drain_timeout_s=10)
    front_end = harness.front_end()
    front_end.accepted("endless", max_tokens=90_000)
    harness.shared_status.ask_to_drain()
    harness.passes(5)
    front_end.read()
    assert "endless" not in front_end.ends
    harness.clock.advance(11)
    (end,) = front_end.wait_for_end("endless")
    assert end.finish == "shutdown"


def test_run_returns_once_drained_and_acknowledged(harness: Harness) -> None:
    """The loop ends by itself; nothing spins and nothing hangs."""
    harness.shared_status.ask_to_drain()
    harness.actor.run()
    assert harness.actor.counters.passes <= 3


def test_a_second_request_to_drain_does_not_wait_for_readers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does: an answer that nobody has acknowledged may still be read."""

    class StillWaits(Exception):
        pass

    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=3)
    harness.run_until(lambda: harness.actor.counters.ended.get("length"))
    run_pass, passes = harness.actor.run_pass, itertools.count(1)

    def no_wait(wait_ms: int = 0) -> PassReport:
        if next(passes) % 5 == 0:
            raise StillWaits
        return run_pass(0)

    monkeypatch.setattr(harness.actor, "run_pass", no_wait)
    harness.shared_status.ask_to_drain()
    with pytest.raises(StillWaits):
        harness.actor.run()
    harness.shared_status.ask_to_drain()
    harness.actor.run()


@pytest.mark.parametrize("place", ["insert", "prefill", "token"])
def test_a_row_that_fails_ends_alone(make_harness: Make, place: str) -> None:
    """mlx-lm BatchGenerator: an exception in one row must not lose the others."""
    fault = FakeFault(place=place, action="fail", token=666)  # type: ignore[arg-type]
    harness = make_harness(FakeEngineConfig(faults=(fault,)))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1, 2], max_tokens=10) for i in range(4)]
    for insert in inserts:
        front_end.send(insert)
    front_end.send(front_end.insert_message("bad", [666, 2], max_tokens=10))
    front_end.wait_for_end("bad", *(insert.request for insert in inserts))
    assert front_end.ends["bad"][0].finish == "error"
    assert front_end.ends["bad"][0].message
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_a_failed_step_costs_nobody_a_token(make_harness: Make) -> None:
    """A `next()` that fails once: the engine is rebuilt and every row goes on from its token log."""
    fault = FakeFault(place="next", action="raise", index=6)
    harness = make_harness(FakeEngineConfig(faults=(fault,)))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1], max_tokens=30) for i in range(4)]
    for insert in inserts:
        front_end.send(insert)
    front_end.wait_for_end(*(insert.request for insert in inserts))
    assert harness.actor.counters.engine_failures == 1
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_a_row_that_poisons_every_step_is_found_and_ended(make_harness: Make) -> None:
    """smg servicer 0.14.1, measured: a poisoned row made next() raise for ever. Here it alone ends, in two failures."""
    fault = FakeFault(place="next", action="raise", token=666, times=None)
    harness = make_harness(FakeEngineConfig(faults=(fault,)))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1], max_tokens=200) for i in range(5)]
    for insert in inserts:
        front_end.send(insert)
    harness.run_until(lambda: harness.engine.stats().rows_decoding == 5)
    front_end.accepted("bad", [666], max_tokens=10)
    front_end.wait_for_end("bad", *(insert.request for insert in inserts))
    assert front_end.ends["bad"][0].finish == "error"
    assert harness.actor.counters.engine_failures == 2
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_who_waits_behind_a_guilty_row_is_cleared_by_its_own_first_token(make_harness: Make) -> None:
    """It goes on, and whoever comes new has a row beside it: nobody waits until it has ended."""
    fault = FakeFault(place="next", action="raise", token=666, times=None)
    harness = make_harness(FakeEngineConfig(faults=(fault,)))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1], max_tokens=400) for i in range(2)]
    front_end.send(front_end.insert_message("bad", [666], max_tokens=10))
    for insert in inserts:
        front_end.send(insert)
    front_end.wait_for_end("bad")
    assert harness.actor.counters.engine_failures == 2
    new = front_end.insert_message("new", [9], max_tokens=10)
    front_end.send(new)
    front_end.wait_for_end("new")
    assert not front_end.ends.keys() & {"r0", "r1"}
    front_end.wait_for_end("r0", "r1")
    for insert in (*inserts, new):
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_an_engine_that_keeps_failing_ends_the_loop(make_harness: Make) -> None:
    """smg servicer: `except Exception: log; continue` for ever. Here failures are bounded, then the process ends."""
    from zmqengine.worker.actor import EngineBroken

    fault = FakeFault(place="next", action="raise", times=None)
    harness = make_harness(FakeEngineConfig(faults=(fault,)), engine_failures_max=3)
    front_end = harness.front_end()
    for index in range(20):
        front_end.send(front_end.insert_message(f"r{index}", max_tokens=10))
    with pytest.raises(EngineBroken, match="4 engine failures"):
        harness.run_until(lambda: False)
    assert harness.actor.counters.engine_failures == 4
    harness.actor.fail_all("broken")

    def last_words() -> list[str]:
        front_end.read()
        return [output.message for output in front_end.outputs if isinstance(output, Fatal)]

    wait_until(last_words, "nobody is told that the worker ends")
    assert last_words() == ["broken"]


def test_whichever_step_fails_each_client_gets_one_answer_and_the_worker_serves_on(
    make_harness: Make,
) -> None:
    """Fault by step: next() raises once at step k, for every k of a run."""
    for step in range(12):
        fault = FakeFault(place="next", action="raise", index=step)
        harness = make_harness(FakeEngineConfig(prefill_chunk=4, faults=(fault,)))
        first, second = harness.front_end(), harness.front_end()
        inserts = {}
        for name, front_end in (("a", first), ("b", first), ("c", second)):
            insert = front_end.insert_message(name, [ord(name), 2, 3, 4, 5, 6], max_tokens=6)
            inserts[name] = (front_end, insert)
            assert isinstance(front_end.call(insert), Accepted)
        for name, (front_end, insert) in inserts.items():
            (end,) = front_end.wait_for_end(name)
            assert end.finish == "length"
            assert front_end.tokens[name] == expected_tokens(row_of(insert))
        first.accepted("after")
        first.wait_for_end("after")


class Phantoms(FakeEngine):
    """Tells of a row that nobody has put in."""

    def next(self) -> StepResult:
        result = super().next()
        result.tokens.append(RowToken(12_345, 7, None, None))
        result.prefills.append(RowPrefill(12_345, 1, 2, 0))
        result.failures.append(RowFailure(12_345, "it never was"))
        return result


def test_unknown_rows_from_the_engine_disturb_nothing(make_harness: Make) -> None:
    """smg #1427 review: phantoms. What is told of a row that has left is dropped."""
    harness = make_harness(Phantoms())
    front_end = harness.front_end()
    insert = front_end.insert_message("r")
    front_end.call(insert)
    front_end.wait_for_end("r")
    assert front_end.tokens["r"] == expected_tokens(row_of(insert))
    assert harness.actor.counters.engine_failures == 0


def test_memory_admission_waits_and_then_serves(make_harness: Make) -> None:
    """mlx-lm #854, #1390, #1909: projected admission. What does not fit now waits; nobody overtakes it for ever."""
    per_token = FakeEngine().project_bytes(1)
    harness = make_harness(memory_limit_bytes=112 * per_token, prompt_cache_bytes=0)
    front_end = harness.front_end()
    front_end.send(front_end.insert_message("a", [1] * 10, max_tokens=50))
    front_end.send(front_end.insert_message("big", [2] * 10, max_tokens=80))
    front_end.send(front_end.insert_message("small", [3], max_tokens=2))
    harness.read_commands(3)
    assert [request.id for request in harness.actor.scheduler.running.values()] == ["a"]
    front_end.wait_for_end("a", "big", "small")
    assert next(iter(front_end.ends)) == "a"
    never = front_end.rejected("never", [1] * 10, max_tokens=91)
    assert never.code == "never_fits"
    assert front_end.accepted("just", [1] * 10, max_tokens=90).state == "queued"
    front_end.wait_for_end("just")


def test_two_hundred_at_once_all_complete(harness: Harness) -> None:
    """mlx_lm.server, measured: 200 requests at once, 97 completed. Here 200 of 200; smg bench: no stall at 16 or 64."""
    front_ends = [harness.front_end() for _ in range(4)]
    for index in range(200):
        front_ends[index % 4].send(
            front_ends[index % 4].insert_message(f"r{index}", [index + 1], max_tokens=16)
        )
    for number, front_end in enumerate(front_ends):
        front_end.wait_for_end(*(f"r{index}" for index in range(200) if index % 4 == number))
    assert sum(len(tokens) for front_end in front_ends for tokens in front_end.tokens.values()) == 3200


def test_idempotent_insert_conflict_and_unknown_rejections(harness: Harness) -> None:
    """The same id with the same contents is the same request; with others it is a conflict."""
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=300)
    first = front_end.call(insert)
    again = front_end.call(insert)
    assert isinstance(first, Accepted)
    assert isinstance(again, Accepted)
    assert again.seed == first.seed
    other = front_end.insert("r", [9, 9], max_tokens=300)
    assert isinstance(other, Rejected)
    assert other.code == "conflict"
    assert isinstance(front_end.abort("r"), Done)
    front_end.wait_for_end("r")
    assert harness.actor.counters.accepted == 1
