"""The scheduler in a worker: admission by memory, preemption, preparation, fairness and refusals."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.workers import wait_until
from tests.worker.harness import FrontEnd, Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.interface import EngineMemory
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Accepted, Ack
from zmqengine.worker import lifecycle as lifecycle_module
from zmqengine.worker.preparing.preparer import LONG_PROMPT_TOKENS
from zmqengine.worker.requests.live_request import LiveRequest, Prepared
from zmqengine.worker.scheduler.rates import ServiceRates
from zmqengine.worker.wire.session import Session

Make = Callable[..., Harness]
GIB = 1 << 30


def send_all(front_end: FrontEnd, inserts: list[Any]) -> None:
    for insert in inserts:
        front_end.send(insert)
    front_end.harness.read_commands(len(inserts))


def test_a_poisoned_row_among_full_rows_ends_alone(make_harness: Make) -> None:
    """Every row taken and the second one poisoned: the others go back into the engine once each and end well."""
    fault = FakeFault(place="next", action="raise", token=666, times=None)
    harness = make_harness(FakeEngineConfig(rows_max=8, faults=(fault,)))
    front_end = harness.front_end()
    inserts = [
        front_end.insert_message(f"r{i}", [666 if i == 1 else i + 1, 2], max_tokens=60) for i in range(8)
    ]
    send_all(front_end, inserts)
    front_end.wait_for_end(*(insert.request for insert in inserts))
    for insert in inserts:
        end = front_end.ends[insert.request][0]
        if insert.request == "r1":
            assert end.finish == "error"
        else:
            assert (end.finish, end.message) == ("length", "")
            assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_requests_without_a_limit_share_memory_and_are_parked_when_it_runs_short(make_harness: Make) -> None:
    """Sixteen chats that name no max_tokens run at once, memory holds at every step, and nobody loses a token."""
    engine = FakeEngineConfig(
        kv_bytes_token=147_000, context_tokens=262_144, rows_max=32, prefill_chunk=8192, eos_index=1500
    )
    harness = make_harness(engine, memory_limit_bytes=16 * GIB)
    front_ends = [harness.front_end() for _ in range(16)]
    inserts = {}
    for number, front_end in enumerate(front_ends):
        inserts[front_end] = front_end.insert_message("r", [number + 1] * 6000, max_tokens=None)
        front_end.send(inserts[front_end])
    harness.read_commands(16)
    harness.run_until(lambda: len(harness.actor.scheduler.running) == 16, passes_max=200)
    harness.run_until(
        lambda: all(front_end.read() or "r" in front_end.ends for front_end in front_ends), passes_max=20_000
    )
    for front_end, insert in inserts.items():
        assert front_end.ends["r"][0].finish == "stop"
        assert front_end.tokens["r"] == expected_tokens(row_of(insert), engine)
    counters = harness.actor.counters
    assert counters.parked > 0
    # Rows that are parked for want of memory cannot keep their caches: what they read again is counted, and bounded.
    assert 0 < counters.tokens_read_again <= counters.parked * 7500
    assert harness.engine.stats().prompt_tokens == 16 * 6000 + counters.tokens_read_again + counters.parked


def test_one_request_may_fill_all_memory_there_is_and_ends_there(make_harness: Make) -> None:
    """Without a limit of its own a request ends with `length` where memory ends, and says so before it starts."""
    harness = make_harness(FakeEngineConfig(kv_bytes_token=1000), memory_limit_bytes=555_556)
    front_end = harness.front_end()
    front_end.accepted("r", [1, 2, 3], max_tokens=None)
    (end,) = front_end.wait_for_end("r")
    assert end.finish == "length"
    assert len(front_end.tokens["r"]) == 497
    refused = front_end.rejected("never", [1, 2, 3], max_tokens=498)
    assert refused.code == "never_fits"
    assert "the largest request that fits has 500 tokens" in refused.message
    assert front_end.rejected("never", [1] * 501, max_tokens=None).code == "never_fits"


def test_context_max_caps_what_one_request_may_hold(make_harness: Make) -> None:
    """`--context-max` holds for requests with a limit and without one."""
    harness = make_harness(context_max=50)
    front_end = harness.front_end()
    front_end.accepted("open", [1, 2, 3], max_tokens=None)
    (end,) = front_end.wait_for_end("open")
    assert (end.finish, len(front_end.tokens["open"])) == ("length", 47)
    assert front_end.rejected("over", [1, 2, 3], max_tokens=48).code == "context_exceeded"


def test_two_rows_that_do_not_fit_together_both_end(make_harness: Make) -> None:
    """The younger is parked, as often as it must be; the older never is, so both get to their end."""
    engine = FakeEngineConfig(kv_bytes_token=1000, context_tokens=100_000)
    harness = make_harness(engine, memory_limit_bytes=1_112_000, growth_tokens=16)
    front_end = harness.front_end()
    inserts = [
        front_end.insert_message(name, [number], max_tokens=900) for number, name in enumerate("ab", 1)
    ]
    send_all(front_end, inserts)
    front_end.wait_for_end("a", "b")
    assert list(front_end.ends) == ["a", "b"]
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))
    assert 1 <= harness.actor.counters.parked <= 3


def test_nobody_joins_where_others_need_the_room_to_grow(make_harness: Make) -> None:
    """Now it would fit, but not beside the next step of the row that is there: it would be parked for that at once."""
    engine = FakeEngineConfig(kv_bytes_token=1000, context_tokens=100_000)
    harness = make_harness(engine, memory_limit_bytes=1_112_000, growth_tokens=16)
    front_end = harness.front_end()
    # Of 1000 tokens the first is promised 416 to begin with, and the second asks for 574.
    inserts = [
        front_end.insert_message(name, [number] * prompt, max_tokens=100)
        for number, (name, prompt) in enumerate({"a": 400, "b": 558}.items(), 1)
    ]
    send_all(front_end, inserts)
    front_end.wait_for_end("a", "b")
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))
    assert harness.actor.counters.parked == 0


class FarAhead(FakeEngine):
    """Its caches are as far ahead of what it has told as those of an engine that drafts."""

    def __init__(self, config: FakeEngineConfig) -> None:
        super().__init__(config)
        self.step_tokens_max = 9

    def memory(self) -> EngineMemory:
        memory = super().memory()
        tokens = 0
        for row in self._rows.values():
            end = row.total + (row.request.max_tokens or 0) - len(row.request.emitted)
            # Of two steps of tokens one is told.
            tokens += min(2 * self.step_tokens_max - 1, end - row.held) if row.decoding else 0
        return dataclasses.replace(memory, kv=memory.kv + self.project_bytes(tokens))


def test_no_cache_outgrows_what_was_promised_for_it(make_harness: Make) -> None:
    """Also where one step makes more tokens of a row than it is promised at a time; `check` looks in every pass."""
    harness = make_harness(FarAhead(FakeEngineConfig()), growth_tokens=8)
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=100)
    front_end.call(insert)
    front_end.wait_for_end("r")
    assert front_end.tokens["r"] == expected_tokens(row_of(insert))


def test_a_row_that_is_parked_while_it_reads_counts_what_it_had_read(make_harness: Make) -> None:
    """Not all of its prompt: what is read again is told of, and not charged twice."""
    harness = make_harness(FakeEngineConfig(rows_max=1, prefill_chunk=100))
    batch, person = harness.front_end(), harness.front_end()
    batch.accepted("long", [1] * 1000, priority=50)
    harness.run_until(lambda: harness.engine.stats().prompt_tokens == 300)
    person.accepted("now", [2] * 10, priority=-10)
    person.wait_for_end("now")
    batch.wait_for_end("long")
    assert harness.actor.counters.parked == 1
    read_before = harness.actor.counters.tokens_read_again
    assert read_before in range(300, 500, 100)
    assert harness.engine.stats().prompt_tokens == 1000 + read_before + 10


def test_an_abort_of_a_parked_row_gives_back_what_was_kept_for_its_return(make_harness: Make) -> None:
    """In the next pass: parked rows go last where memory is short."""
    harness = make_harness(FakeEngineConfig(rows_max=1, prompt_cache_bytes=GIB))
    batch, person = harness.front_end(), harness.front_end()
    batch.accepted("b", [1] * 40, max_tokens=300, priority=50)
    harness.run_until(lambda: harness.engine.stats().rows_decoding)
    person.accepted("now", [2] * 10, max_tokens=100, priority=-10)
    harness.run_until(lambda: harness.engine.memory().parked)
    batch.abort("b")
    harness.pass_()
    assert harness.engine.memory().parked == 0
    person.wait_for_end("now")


def test_a_suspect_that_has_to_give_way_is_tried_again(make_harness: Make) -> None:
    """After a failed step one row grows while the other, on probation, still reads: both come to their ends."""
    fault = FakeFault(place="next", action="raise", index=2)
    engine = FakeEngineConfig(kv_bytes_token=1000, prefill_chunk=10, faults=(fault,))
    harness = make_harness(engine, memory_limit_bytes=1_112_000, growth_tokens=16)
    front_end = harness.front_end()
    inserts = [
        front_end.insert_message("a", [1] * 10, max_tokens=600),
        front_end.insert_message("b", [2] * 900, max_tokens=50),
    ]
    send_all(front_end, inserts)
    front_end.wait_for_end("a", "b")
    assert harness.actor.counters.engine_failures == 1
    assert harness.actor.counters.parked >= 1
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_all_sessions_of_a_key_are_served_and_bounded_as_one(harness: Harness) -> None:
    """Who opens more of them gets no more; without keys each session is its own."""
    front_end = harness.front_end()

    def flow(user: str, secret: bytes) -> str:
        session = Session(secret, user, "test", b"route")
        return harness.actor.lifecycle._ticket(front_end.insert_message("r"), session, 0.0).flow

    assert flow("a key", b"1" * 32) == flow("a key", b"2" * 32) != flow("another", b"3" * 32)
    assert flow("", b"1" * 32) != flow("", b"2" * 32)


def test_an_urgent_request_takes_the_place_of_batch_work_that_goes_on_later(make_harness: Make) -> None:
    """Every row held by batch work: the urgent one starts within two passes, and nothing is read twice."""
    harness = make_harness(FakeEngineConfig(rows_max=4, prompt_cache_bytes=GIB))
    batch, person = harness.front_end(), harness.front_end()
    inserts = [batch.insert_message(f"b{i}", [i + 1] * 40, max_tokens=300, priority=50) for i in range(6)]
    send_all(batch, inserts)
    harness.run_until(lambda: harness.engine.stats().rows_decoding == 4)
    person.send(person.insert_message("now", [9, 9], max_tokens=5, priority=-10))
    harness.read_commands(1)
    (now,) = [row for row in harness.actor.lifecycle.live() if row.id == "now"]
    harness.passes(1)
    assert now.prefill_pass - now.arrival_pass + 1 <= 2
    person.wait_for_end("now")
    batch.wait_for_end(*(insert.request for insert in inserts))
    for insert in inserts:
        assert batch.tokens[insert.request] == expected_tokens(row_of(insert))
    assert harness.actor.counters.parked >= 1
    assert harness.actor.counters.tokens_read_again == 0


def test_a_session_that_floods_does_not_make_another_one_wait(make_harness: Make) -> None:
    """A sends 200 requests of 256 tokens; B one of 16 now and then, which waits at most 2 passes more than alone."""
    harness = make_harness(FakeEngineConfig(rows_max=32, prompt_cache_bytes=GIB), queue_max=1024)
    flood, other = harness.front_end(), harness.front_end()
    inserts = [flood.insert_message(f"a{i}", [i + 1] * 20, max_tokens=256) for i in range(200)]
    send_all(flood, inserts)
    waits = []
    for number in range(20):
        harness.passes(37)
        other.send(other.insert_message(f"b{number}", [500 + number] * 20, max_tokens=16))
        harness.read_commands(1)
        (mine,) = [
            request for request in harness.actor.lifecycle.live() if request.session_id == other_id(other)
        ]
        other.wait_for_end(f"b{number}")
        waits.append(mine.prefill_pass - mine.arrival_pass + 1)
    assert max(waits) <= 3, waits
    flood.wait_for_end(*(insert.request for insert in inserts))
    for insert in inserts:
        assert flood.tokens[insert.request] == expected_tokens(row_of(insert))
    assert harness.actor.counters.tokens_read_again == 0


def other_id(front_end: FrontEnd) -> str:
    assert front_end.welcome is not None
    return front_end.welcome.session


def test_sessions_that_saturate_the_worker_are_served_alike(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sessions that always have work, with prompts of unlike length: Jain's index of cost served is >= 0.99."""
    # What a prompt token costs is measured in seconds of this machine; here it is what it is before that is known.
    monkeypatch.setattr(ServiceRates, "note_step", lambda *_: None)
    harness = make_harness(FakeEngineConfig(rows_max=8, prefill_chunk=256, context_tokens=100_000))
    front_ends = [harness.front_end() for _ in range(8)]
    numbers = iter(range(100_000))
    live: dict[FrontEnd, list[str]] = {front_end: [] for front_end in front_ends}

    def all_ends_are_here() -> bool:
        for front_end in front_ends:
            front_end.read()
        return sum(len(front_end.ends) for front_end in front_ends) == harness.actor.counters.ends

    def refill() -> None:
        sent = 0
        # However slowly frames travel here: a session that has not heard of an end would have less work than it thinks.
        wait_until(all_ends_are_here, "not all ends arrive")
        for place, front_end in enumerate(front_ends):
            live[front_end] = [name for name in live[front_end] if name not in front_end.ends]
            while len(live[front_end]) < 4:
                name = f"r{next(numbers)}"
                prompt = [1 + place] * (10 * 2**place)
                front_end.send(front_end.insert_message(name, prompt, max_tokens=32))
                live[front_end].append(name)
                sent += 1
        if sent:
            harness.read_commands(sent)

    for _ in range(800):
        refill()
        harness.passes(4)
    order = harness.actor.scheduler.order
    served = [
        sum(len(front_end.tokens[name]) for name in front_end.tokens)
        + order.prefill_cost * 10 * 2**place * len(front_end.tokens)
        for place, front_end in enumerate(front_ends)
    ]
    jain = sum(served) ** 2 / (len(served) * sum(cost * cost for cost in served))
    assert jain >= 0.99, (jain, served)


@pytest.mark.usefixtures("small_heap")
def test_nothing_is_kept_of_requests_that_ended_long_before_their_deadline(make_harness: Make) -> None:
    """Ended and acknowledged requests are gone, though their deadline is a day away and they never had a row."""
    harness = make_harness(FakeEngineConfig(rows_max=1))
    front_end = harness.front_end()
    front_end.accepted("head", max_tokens=4000)
    names = [f"r{i}" for i in range(200)]
    for name in names:
        front_end.accepted(name, max_tokens=5, deadline_ms=86_400_000, priority=100)
        front_end.abort(name)
    front_end.wait_for_end(*names)
    front_end.call(Ack(front_end.next_call(), names))
    gc.collect()
    assert [request.id for request in gc.get_objects() if type(request) is LiveRequest] == ["head"]
    assert len(harness.actor.lifecycle._deadlines) == 0


def test_a_failed_step_names_the_requests_that_were_being_cancelled(
    make_harness: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """An error during a cancel is logged with the id of the cancelled request, not only of those that go on."""
    harness = make_harness(FakeEngineConfig(faults=(FakeFault(place="remove", action="raise"),)))
    front_end = harness.front_end()
    front_end.accepted("cancelled", max_tokens=500)
    front_end.accepted("other", max_tokens=50)
    harness.passes(3)
    front_end.abort("cancelled")
    front_end.wait_for_end("cancelled", "other")
    (failed,) = [record for record in caplog.records if record.getMessage() == "engine failed"]
    assert (failed.requests, failed.cancelled) == (["other"], ["cancelled"])  # type: ignore[attr-defined]


# --- preparing ---------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every request is prepared for as long as the gate is closed; a prompt with token 13 is then refused."""
    opened = threading.Event()

    def preparation_of(insert: Any, compiler: object) -> Any:
        def prepare() -> Prepared:
            assert opened.wait(60)
            if 13 in insert.prompt:
                raise BadRequest("token 13 brings bad luck")
            if 14 in insert.prompt:
                raise ValueError("a defect")
            return Prepared()

        return prepare

    monkeypatch.setattr(lifecycle_module, "preparation_of", preparation_of)
    yield opened
    opened.set()


def test_a_request_is_prepared_beside_the_actor_and_may_fail_there(
    make_harness: Make, gate: threading.Event
) -> None:
    """A refusal and a defect each end their request alone, the first with its code."""
    harness = make_harness()
    front_end = harness.front_end()
    inserts = [
        front_end.insert_message(name, [token]) for name, token in (("good", 1), ("bad", 13), ("defect", 14))
    ]
    for insert in inserts:
        reply = front_end.call(insert)
        assert isinstance(reply, Accepted)
        assert reply.state == "queued"
    assert front_end.call(inserts[0]) == Accepted(inserts[0].call, front_end.epoch, "good", 0, 1, "queued")
    harness.passes(5)
    assert {request.phase for request in harness.actor.lifecycle.live()} == {"preparing"}
    gate.set()
    good, bad, defect = front_end.wait_for_end("good", "bad", "defect")
    assert good.finish == "length"
    assert (bad.finish, bad.code, bad.message) == ("error", "bad_request", "token 13 brings bad luck")
    assert (defect.finish, defect.code) == ("error", "")


def test_a_request_can_be_aborted_while_it_is_prepared(make_harness: Make, gate: threading.Event) -> None:
    """Its end does not wait for the preparation, and nothing comes of it afterwards; a drain ends it as well."""
    harness = make_harness()
    front_end = harness.front_end()
    front_end.accepted("aborted")
    front_end.abort("aborted")
    assert front_end.wait_for_end("aborted")[0].finish == "abort"
    front_end.accepted("late", deadline_ms=1000)
    harness.clock.advance(2)
    assert front_end.wait_for_end("late")[0].finish == "deadline"
    front_end.accepted("drained")
    harness.shared_status.ask_to_drain()
    assert front_end.wait_for_end("drained")[0].finish == "shutdown"
    gate.set()
    harness.passes(5)
    assert not harness.actor.lifecycle.live()


def test_a_long_prompt_is_packed_beside_the_actor(make_harness: Make) -> None:
    """The one preparation that every worker makes; its result is the same stream, and a repeated insert is known."""
    engine = FakeEngineConfig(context_tokens=100_000, prefill_chunk=100_000)
    harness = make_harness(engine)
    front_end = harness.front_end()
    insert = front_end.insert_message("long", [1, 2, 3, 4] * (LONG_PROMPT_TOKENS // 4))
    assert isinstance(front_end.call(insert), Accepted)
    assert isinstance(front_end.call(insert), Accepted)
    front_end.wait_for_end("long")
    assert front_end.tokens["long"] == expected_tokens(row_of(insert), engine)
    assert isinstance(front_end.call(insert), Accepted)
    assert front_end.rejected("long", [1, 2, 3]).code == "conflict"


@pytest.mark.parametrize(
    ("emitted", "finish"), [([5, 0], "stop"), ([5, 6, 7], "length"), ([5, 6, 7, 8], "length")]
)
def test_output_that_had_ended_is_ended_and_not_continued(
    harness: Harness, emitted: list[int], finish: str
) -> None:
    """A worker died between the last token and its end: the next one says the end at once."""
    front_end = harness.front_end()
    front_end.tokens["r"] = list(emitted)
    accepted = front_end.accepted("r", max_tokens=3, emitted=emitted)
    assert accepted.next_index == len(emitted)
    (end,) = front_end.wait_for_end("r")
    assert (end.finish, front_end.tokens["r"]) == (finish, emitted)


def test_cached_tokens_never_exceed_the_prompt(make_harness: Make) -> None:
    """A request that goes on from `emitted` finds all of it in the prompt cache: its output is not called prompt."""
    harness = make_harness(FakeEngineConfig(prompt_cache_bytes=GIB))
    front_end = harness.front_end()
    front_end.call(front_end.insert_message("a", [3] * 40, max_tokens=60))
    front_end.wait_for_end("a")
    insert = front_end.insert_message("b", [3] * 40, max_tokens=80, emitted=front_end.tokens["a"])
    front_end.tokens["b"] = list(front_end.tokens["a"])
    front_end.call(insert)
    (end,) = front_end.wait_for_end("b")
    assert end.cached_tokens == 40
    assert front_end.tokens["b"] == expected_tokens(row_of(insert))


def test_a_priority_that_is_not_for_a_front_end_is_refused(make_harness: Make) -> None:
    """Honoured or refused: it is not quietly made less urgent."""
    harness = make_harness(priority_min=("te*=5",))
    front_end = harness.front_end()
    refused = front_end.rejected("r", priority=4)
    assert refused.code == "not_authorized"
    assert "5 is the most urgent" in refused.message
    front_end.accepted("s", priority=5)


def test_shares_of_the_service_follow_the_configuration(make_harness: Make) -> None:
    """Two sessions of one name weigh alike; the weight is in their tickets."""
    harness = make_harness(share=("test=3",))
    front_end = harness.front_end()
    front_end.accepted("r")
    (request,) = harness.actor.lifecycle.live()
    assert request.ticket.weight == 3


def test_a_deadline_that_cannot_be_met_is_refused_with_the_estimate(make_harness: Make) -> None:
    """From the measured rate; without a measurement nothing is refused."""
    harness = make_harness(FakeEngineConfig(rows_max=1, step_ms=5))
    front_end = harness.front_end()
    front_end.accepted("unknown", max_tokens=100, deadline_ms=1)
    harness.clock.advance(1)
    front_end.wait_for_end("unknown")
    front_end.accepted("measured", max_tokens=100)
    front_end.wait_for_end("measured")
    refused = front_end.rejected("late", max_tokens=100, deadline_ms=10)
    assert refused.code == "deadline"
    assert "it would take about" in refused.message
    front_end.accepted("in time", max_tokens=10, deadline_ms=60_000)
    assert front_end.wait_for_end("in time")[0].finish == "length"
