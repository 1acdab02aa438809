"""Who may read and steer what, and how long a front-end lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from tests.worker.harness import FrontEnd, Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.protocol import codec
from zmqengine.protocol.messages import (
    Abort,
    Ack,
    Bye,
    Done,
    Hello,
    Ping,
    Rejected,
    Replay,
    Resume,
    TokenFrame,
    Welcome,
)
from zmqengine.worker.intake import commands
from zmqengine.worker.intake.sessions import SUBSCRIBE_S
from zmqengine.worker.wire import outgoing
from zmqengine.worker.wire import session as session_module

Make = Callable[..., Harness]


@pytest.mark.parametrize("topic", ["", "s", "s/", "s/" + "0" * 32 + "/", "someone else's", "its prefix"])
def test_no_one_reads_another_sessions_stream(harness: Harness, topic: str) -> None:
    """Prefixes, the empty subscription and guesses are never granted; only the exact topic of an own session is."""
    owner = harness.front_end()
    stranger = harness.front_end(live=False)
    stranger.say_hello()
    assert owner.welcome is not None
    if topic == "its prefix":
        topic = owner.welcome.topic[:20]
    stranger.out.subscribe(topic)
    stranger.out.connect(harness.sockets.endpoints.out)
    harness.run_until(lambda: harness.actor.counters.refused_subscriptions == 1)
    owner.accepted("secret", max_tokens=50)
    owner.wait_for_end("secret")
    assert not stranger.out.poll(50)


def test_insert_before_the_grant_is_refused(harness: Harness) -> None:
    """The slow-joiner race cannot happen: without a granted subscription there is no insert."""
    front_end = harness.front_end(live=False)
    front_end.say_hello()
    assert front_end.rejected("r").code == "not_subscribed"
    front_end.subscribe()
    front_end.accepted("r")
    front_end.wait_for_end("r")


def test_tokens_published_the_instant_they_are_inserted_are_not_lost(make_harness: Make) -> None:
    """300 requests that finish in the step after their insert: every token arrives."""
    harness = make_harness(FakeEngineConfig(instant=True, rows_max=64))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1], max_tokens=5) for i in range(300)]
    for insert in inserts:
        front_end.send(insert)
    front_end.wait_for_end(*(insert.request for insert in inserts))
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_commands_need_a_session_of_this_epoch(harness: Harness) -> None:
    """No hello: unknown_session. An insert of another epoch: stale_epoch."""
    stranger = harness.front_end(live=False)
    for message in (Ping(1), Abort(2, "r"), Ack(3, ["r"]), Bye(4), Resume(5, "r", stranger.epoch, 0)):
        reply = stranger.call(message)
        assert isinstance(reply, Rejected)
        assert reply.code == "unknown_session"
    front_end = harness.front_end()
    assert front_end.rejected("r", epoch=os.urandom(8)).code == "stale_epoch"
    reply = front_end.call(Resume(9, "r", os.urandom(8), 0))
    assert isinstance(reply, Rejected)
    assert reply.code == "stale_epoch"


def test_hello_with_no_common_version_is_refused(harness: Harness) -> None:
    """Version ranges are compared, and the reply says what the worker speaks."""
    front_end = harness.front_end(live=False)
    reply = front_end.call(Hello(1, (2, 3), "future", b"x" * 16))
    assert isinstance(reply, Rejected)
    assert reply.code == "unsupported_protocol"
    assert "1" in reply.message


def test_a_take_over_fences_the_old_connection_and_keeps_the_requests(harness: Harness) -> None:
    """A front-end that restarts with its secret gets its requests back; the one before can do nothing more."""
    old = harness.front_end()
    insert = old.insert_message("r", max_tokens=40)
    old.call(insert)
    harness.passes(10)
    new = harness.front_end(live=False, secret=old.secret, expects_gaps=True)
    welcome = new.say_hello()
    assert old.welcome is not None
    assert welcome.topic != old.welcome.topic
    assert [row.request for row in welcome.requests] == ["r"]
    fenced = old.call(Abort(77, "r"))
    assert isinstance(fenced, Rejected)
    assert fenced.code == "fenced"
    new.subscribe()
    harness.run_until(lambda: harness.actor.counters.ended.get("length"))
    replay = new.call(Resume(8, "r", new.epoch, 0))
    assert isinstance(replay, Replay)
    assert replay.row.tokens == expected_tokens(row_of(insert))
    assert replay.row.end is not None


def test_hello_again_from_the_same_connection_changes_nothing(harness: Harness) -> None:
    """A repeated hello, its reply lost, gets the same welcome."""
    front_end = harness.front_end()
    first = front_end.welcome
    again = front_end.call(Hello(50, (1, 1), "test", front_end.secret))
    assert isinstance(again, Welcome)
    assert first is not None
    assert (again.topic, again.session) == (first.topic, first.session)
    front_end.accepted("r")
    front_end.wait_for_end("r")


def test_the_lease_of_a_silent_front_end_runs_out_in_every_phase(make_harness: Make) -> None:
    """mlx-openai-server #321, omlx #2260: clients that gave up kept the GPU busy. Here a lease ends them."""
    harness = make_harness(FakeEngineConfig(rows_max=1, context_tokens=100_000), lease_ms=10_000)
    front_end = harness.front_end()
    front_end.accepted("running", max_tokens=90_000)
    front_end.accepted("queued", max_tokens=90_000)
    harness.passes(3)
    harness.clock.advance(9)
    assert isinstance(front_end.call(Ping(front_end.next_call())), Done)
    harness.clock.advance(9)
    harness.passes(2)
    front_end.read()
    assert front_end.ends == {}
    harness.clock.advance(2)
    ends = front_end.wait_for_end("running", "queued")
    assert [end.finish for end in ends] == ["lease", "lease"]
    harness.pass_()
    assert harness.engine.stats().rows_decoding == 0
    assert len(harness.actor.sessions) == 0


def test_a_front_end_that_vanishes_is_aborted_after_its_grace_period(make_harness: Make) -> None:
    """mlx_lm.server and others, measured: a client that left was not noticed. The subscription's end tells."""
    harness = make_harness(FakeEngineConfig(context_tokens=100_000), grace_ms=2000)
    front_end, other = harness.front_end(), harness.front_end()
    front_end.accepted("r", max_tokens=90_000)
    other.accepted("r", max_tokens=2000)
    harness.run_until(lambda: harness.engine.stats().rows_decoding == 2)
    front_end.close()
    session = next(iter(harness.actor.sessions))
    harness.run_until(lambda: not session.is_granted)
    assert harness.engine.stats().rows_decoding == 2
    harness.clock.advance(2.1)
    harness.passes(2)
    assert harness.engine.stats().rows_decoding == 1
    other.wait_for_end("r")


def test_the_grace_period_begins_when_the_last_subscriber_has_gone(make_harness: Make) -> None:
    """A front-end may move its subscription to another socket: while one of them is there, so is the front-end."""
    harness = make_harness(FakeEngineConfig(context_tokens=100_000), grace_ms=2000)
    front_end = harness.front_end()
    (session,) = harness.actor.sessions
    second = front_end.context.socket(zmq.SUB)
    second.linger = 0
    second.subscribe(session.topic)
    second.connect(harness.sockets.endpoints.out)
    harness.run_until(lambda: session.subscribers == 2)
    second.close()
    harness.run_until(lambda: session.subscribers == 1)
    harness.clock.advance(2.1)
    harness.passes(2)
    assert list(harness.actor.sessions) == [session]


def test_a_session_that_nobody_subscribes_to_is_gone_long_before_its_lease(make_harness: Make) -> None:
    """A hello costs a place; whoever takes one has to go on."""
    harness = make_harness(grace_ms=100)
    harness.front_end(live=False).say_hello()
    assert len(harness.actor.sessions) == 1
    harness.clock.advance(SUBSCRIBE_S + 0.1)
    harness.passes(2)
    assert len(harness.actor.sessions) == 0


def test_aborts_of_requests_that_never_come_are_kept_in_bounds(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest are remembered: their inserts are refused. Those before are forgotten."""
    monkeypatch.setattr(session_module, "EARLY_ABORTS_MAX", 3)
    front_end = harness.front_end()
    for index in range(5):
        assert isinstance(front_end.abort(f"r{index}"), Done)
    assert [front_end.rejected(f"r{index}").code for index in (2, 3, 4)] == ["aborted"] * 3
    front_end.accepted("r0")
    front_end.accepted("r1")


def test_bye_frees_everything_at_once(harness: Harness) -> None:
    """A front-end that leaves politely leaves nothing behind."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=2000)
    assert isinstance(front_end.call(Bye(front_end.next_call())), Done)
    harness.pass_()
    assert len(harness.actor.sessions) == 0
    assert harness.engine.stats().rows_decoding + harness.engine.stats().rows_prefilling == 0


@pytest.mark.parametrize("phase", ["before insert", "queued", "prefill", "decode", "ended"])
def test_abort_works_in_every_phase_and_twice(make_harness: Make, phase: str) -> None:
    """smg #1427 review: an abort between "pending" and "inserted" was lost. Here it counts in every phase, once."""
    harness = make_harness(FakeEngineConfig(rows_max=1, prefill_chunk=4, context_tokens=100_000))
    front_end = harness.front_end()
    if phase == "queued":
        front_end.accepted("other", max_tokens=20_000)
    if phase != "before insert":
        prompt = list(range(1, 900)) if phase == "prefill" else [1]
        front_end.accepted("r", prompt, max_tokens=3 if phase == "ended" else 50_000)
    if phase == "prefill":
        harness.run_until(lambda: harness.engine.stats().rows_prefilling == 1)
    if phase == "decode":
        harness.run_until(lambda: harness.engine.stats().rows_decoding == 1)
    if phase == "ended":
        front_end.wait_for_end("r")
    assert isinstance(front_end.abort("r"), Done)
    assert isinstance(front_end.abort("r"), Done)
    if phase == "before insert":
        assert front_end.rejected("r").code == "aborted"
        assert harness.actor.counters.accepted == 0
        return
    (end,) = front_end.wait_for_end("r")
    assert end.finish == ("length" if phase == "ended" else "abort")
    if phase == "queued":
        front_end.abort("other")
    harness.pass_()
    stats = harness.engine.stats()
    assert stats.rows_decoding + stats.rows_prefilling == 0


def test_an_abort_takes_effect_within_the_pass_that_reads_it(harness: Harness) -> None:
    """vllm-mlx #8: a cancel takes effect between two steps, never during one; here in the very next pass."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=2000)
    harness.run_until(lambda: harness.engine.stats().rows_decoding == 1)
    front_end.send(Abort(front_end.next_call(), "r"))
    report = harness.pass_with_command()
    assert report.ended == 1
    assert harness.engine.stats().rows_decoding == 0


def test_a_front_end_can_only_abort_its_own(harness: Harness) -> None:
    """Request ids are of a session: another session's id is unknown."""
    owner, other = harness.front_end(), harness.front_end()
    owner.accepted("r", max_tokens=100)
    other.abort("r")
    replay = other.call(Resume(9, "r", other.epoch, 0))
    assert isinstance(replay, Rejected)
    assert replay.code == "unknown_request"
    (end,) = owner.wait_for_end("r")
    assert end.finish == "length"


def test_ack_forgets_ended_requests_only(harness: Harness) -> None:
    """Logs live until acknowledged; a running request cannot be acknowledged away."""
    front_end = harness.front_end()
    front_end.accepted("done", max_tokens=3)
    front_end.wait_for_end("done")
    front_end.accepted("running", max_tokens=2000)
    reply = front_end.call(Ack(front_end.next_call(), ["done", "running", "never"]))
    assert isinstance(reply, Done)
    (session,) = harness.actor.sessions
    assert list(session.requests) == ["running"]
    front_end.abort("running")
    front_end.wait_for_end("running")
    front_end.call(Ack(front_end.next_call(), ["running"]))
    assert harness.actor.outgoing.held_bytes(session) == 0


def test_resume_replays_from_any_index_in_bounded_pieces(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token list is the replay log: from any index, in pieces, with the terminal answer at its end."""
    monkeypatch.setattr(commands, "REPLAY_BYTES_MAX", 5 * 16_384)
    harness = make_harness(FakeEngineConfig(instant=True, context_tokens=100_000))
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=40_000)
    front_end.call(insert)
    whole = expected_tokens(row_of(insert))
    for start in (0, 1, 17_000, 39_999, 40_000):
        have: list[int] = whole[:start]
        pieces = 0
        while True:
            replay = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, len(have)))
            assert isinstance(replay, Replay)
            assert replay.row.first_index == len(have)
            have += replay.row.tokens
            pieces += 1
            assert (replay.row.end is None) == replay.more
            if not replay.more:
                break
        assert have == whole
        assert pieces == max(1, -(-(40_000 - start) // 16_384))


def test_a_resume_from_beyond_the_last_token_is_answered_from_there(harness: Harness) -> None:
    """Whoever counts more than there is gets the true end, and not a gap."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=8)
    front_end.wait_for_end("r")
    replay = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, 1_000))
    assert isinstance(replay, Replay)
    assert (replay.row.first_index, replay.row.tokens, replay.more) == (8, [], False)
    assert replay.row.end is not None


def test_a_replay_with_logprobs_is_bounded_in_bytes(make_harness: Make) -> None:
    """A command of 60 bytes is not answered with megabytes: the front-end asks for one piece after the other."""
    harness = make_harness(FakeEngineConfig(instant=True, context_tokens=100_000))
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=4_000, logprobs=20)
    front_end.wait_for_end("r")
    have = 0
    while True:
        replay = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, have))
        if isinstance(replay, Rejected):
            # libzmq tells a while after it has sent a reply that it has, so the worker may think it is unread.
            assert replay.code == "overloaded"
            continue
        assert isinstance(replay, Replay)
        assert len(codec.encode(replay)[1]) < commands.REPLAY_BYTES_MAX * 1.1
        have += len(replay.row.tokens)
        if not replay.more:
            break
    assert have == 4_000


def test_a_reader_that_does_not_read_does_not_delay_the_others_and_catches_up(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow reader: EAGAIN marks it lagging, the others go on, and it gets everything in the end. A frame for it is made
    again after a while only, not in each pass: it holds all since, up to a bound, and the next goes on there."""
    # 200 tokens with 20 log-probabilities each.
    monkeypatch.setattr(outgoing, "FRAME_TOKENS_MAX", 200 * 22)
    harness = make_harness(FakeEngineConfig(context_tokens=100_000), lease_ms=10_000_000)
    slow, other = harness.front_end(receive_frames_max=10), harness.front_end()
    insert = slow.insert_message("r", max_tokens=3_000, logprobs=20)
    slow.call(insert)
    (session,) = [s for s in harness.actor.sessions if "r" in s.requests]
    harness.run_until(lambda: harness.actor.outgoing.backlog_tokens(session), passes_max=60_000)
    tried: list[bytes] = []
    send = zmq.Socket.send_multipart

    def counted(socket: zmq.Socket[bytes], parts: list[bytes], *args: Any) -> Any:
        tried.append(parts[0])
        return send(socket, parts, *args)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send_multipart", counted)
        harness.passes(20)
        assert session.topic not in tried
        harness.clock.advance(0.03)
        harness.pass_()
        assert tried.count(session.topic) == 1
    other.accepted("o", max_tokens=300)
    assert harness.run_until(lambda: harness.actor.counters.ended.get("length")) <= 302
    other.wait_for_end("o")
    harness.run_until(lambda: harness.actor.counters.ended["length"] == 2, passes_max=60_000)
    assert harness.actor.outgoing.backlog_tokens(session) > 400

    def all_read() -> bool:
        harness.clock.advance(0.03)
        slow.read()
        return "r" in slow.ends

    harness.run_until(all_read, passes_max=100_000)
    assert slow.tokens["r"] == expected_tokens(row_of(insert))


def test_who_takes_over_a_session_that_lags_has_not_fallen_behind(make_harness: Make) -> None:
    """It has not even subscribed: what its predecessor did not read is no reason to end its requests."""
    harness = make_harness(
        FakeEngineConfig(context_tokens=100_000), session_backlog_tokens_max=500, lease_ms=10_000_000
    )
    slow = harness.front_end(receive_frames_max=1)
    slow.call(slow.insert_message("r", max_tokens=20_000, logprobs=20))
    (session,) = harness.actor.sessions
    harness.run_until(lambda: harness.actor.outgoing.backlog_tokens(session), passes_max=60_000)
    heir = harness.front_end(live=False, secret=slow.secret)
    heir.say_hello()
    harness.passes(600)
    harness.clock.advance(0.1)
    harness.passes(2)
    assert not harness.actor.counters.ended


def test_a_reader_past_its_budget_gets_slow_consumer(make_harness: Make) -> None:
    """The budget bounds what one stalled front-end can make the worker hold; its terminal answer still comes."""
    harness = make_harness(
        FakeEngineConfig(context_tokens=1_000_000), session_backlog_tokens_max=3000, lease_ms=10_000_000
    )
    slow = harness.front_end(receive_frames_max=1)
    slow.call(slow.insert_message("r", max_tokens=900_000))
    (session,) = harness.actor.sessions

    def step_time() -> bool:
        harness.clock.advance(0.1)
        return harness.actor.counters.ended.get("slow_consumer") == 1

    harness.run_until(step_time, passes_max=60_000)
    unsent = harness.actor.outgoing.backlog_tokens(session)
    assert 3000 < unsent < 4000

    def read_all() -> bool:
        harness.clock.advance(0.03)
        slow.read()
        return "r" in slow.ends

    harness.run_until(read_all, passes_max=10_000, wait_ms=1)
    assert slow.ends["r"][0].finish == "slow_consumer"
    assert len(slow.tokens["r"]) > 3000


def test_logs_never_acknowledged_are_bounded(make_harness: Make) -> None:
    """vllm-mlx, measured: budgets that hold. Ended, delivered and unacknowledged requests give way to new ones."""
    harness = make_harness(
        FakeEngineConfig(instant=True), requests_per_session_max=10, token_log_bytes_max=65_536
    )
    front_end = harness.front_end()
    for index in range(15):
        front_end.accepted(f"r{index}", max_tokens=2000)
        front_end.wait_for_end(f"r{index}")
    (session,) = harness.actor.sessions
    assert len(session.requests) <= 10
    assert harness.actor.outgoing.held_bytes(session) <= 65_536 + 4 * 2000


def test_a_session_that_holds_too_much_is_refused_more(make_harness: Make) -> None:
    """What still runs is never dropped to make room: the next insert is refused instead."""
    harness = make_harness(requests_per_session_max=3)
    front_end = harness.front_end()
    for index in range(4):
        front_end.send(front_end.insert_message(f"r{index}", max_tokens=4000))
    harness.read_commands(4)
    harness.run_until(lambda: front_end.read() or len(front_end.replies) == 5)
    refused = front_end.replies[-1]
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"


def test_output_that_was_read_locks_nobody_out(make_harness: Make) -> None:
    """A running request with log-probabilities stays within the bound, and others of its front-end are accepted."""
    harness = make_harness(FakeEngineConfig(rows_max=2), token_log_bytes_max=65_536)
    front_end = harness.front_end()
    front_end.accepted("long", max_tokens=1000, logprobs=20)
    (session,) = harness.actor.sessions
    held: list[int] = []
    for number in range(4):
        for _ in range(100):
            harness.clock.advance(0.05)
            harness.pass_()
            held.append(harness.actor.outgoing.held_bytes(session))
        front_end.accepted(f"beside {number}", max_tokens=1)
    # A pass makes one token of 2.7 KB.
    assert 65_536 // 2 < max(held) <= 65_536 + 4_000
    assert front_end.wait_for_end("long")[0].finish == "length"
    rows = [row for one in front_end.outputs if isinstance(one, TokenFrame) for row in one.rows]
    logprobs = [entry for row in rows if row.request == "long" for entry in row.logprobs or ()]
    assert [len(entry.top) for entry in logprobs] == [20] * 1000


def test_a_resume_of_dropped_log_probabilities_leads_to_a_new_insert(make_harness: Make) -> None:
    """The request ends, is forgotten, and comes again with the same id; a resume of what is kept is answered."""
    harness = make_harness(token_log_bytes_max=65_536)
    front_end = harness.front_end(expects_gaps=True)
    insert = front_end.insert_message("r", max_tokens=300, logprobs=20)
    front_end.call(insert)
    (session,) = harness.actor.sessions

    def has_dropped() -> bool:
        harness.clock.advance(0.05)
        return session.requests["r"].log.kept_from > 20

    harness.run_until(has_dropped)
    kept_from = session.requests["r"].log.kept_from
    replay = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, kept_from))
    assert isinstance(replay, Replay)
    refused = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, kept_from - 1))
    assert isinstance(refused, Rejected)
    assert refused.code == "unknown_request"
    assert not session.requests
    front_end.read()
    expected = expected_tokens(row_of(insert))
    front_end.tokens["r"] = expected[: kept_from - 1]
    front_end.accepted("r", max_tokens=300, logprobs=20, emitted=expected[: kept_from - 1])
    front_end.wait_for_end("r")
    assert front_end.tokens["r"] == expected


def test_log_probabilities_nobody_reads_count_as_tokens(make_harness: Make) -> None:
    """A reader that stalls has a budget of memory, whatever its tokens carry."""
    harness = make_harness(
        FakeEngineConfig(context_tokens=1_000_000), session_backlog_tokens_max=3000, lease_ms=10_000_000
    )
    slow = harness.front_end(receive_frames_max=1)
    slow.call(slow.insert_message("r", max_tokens=900_000, logprobs=20))

    def is_ended() -> bool:
        harness.clock.advance(0.1)
        return harness.actor.counters.ended.get("slow_consumer") == 1

    harness.run_until(is_ended, passes_max=60_000)
    (session,) = harness.actor.sessions
    request = session.requests["r"]
    assert 3000 / 22 <= len(request.log) - request.log.sent < 4000 / 22


def test_sessions_are_bounded(make_harness: Make) -> None:
    """A front-end too many is told so."""
    harness = make_harness(sessions_max=2)
    harness.front_end()
    harness.front_end()
    third = FrontEnd(harness)
    harness.front_ends.append(third)
    reply = third.call(Hello(1, (1, 1), "third", third.secret))
    assert isinstance(reply, Rejected)
    assert reply.code == "overloaded"


def test_lost_frames_are_recovered_by_resume(make_harness: Make) -> None:
    """A publisher that drops 10 % of its frames: gaps and watermarks lead to resume, and nothing is lost."""
    harness = make_harness(fault_drop_frames=0.1)
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=400)
    front_end.send(insert)
    have: list[int] = []
    came = 0
    harness.run_until(lambda: harness.actor.counters.ended.get("length"))
    harness.clock.advance(1.5)
    harness.passes(2)
    while front_end.out.poll(500):
        _, *frames = front_end.out.recv_multipart()
        output = front_end._output_decoder.decode(frames)
        for row in getattr(output, "rows", []):
            came += len(getattr(row, "tokens", ()))
            if hasattr(row, "tokens") and row.first_index == len(have):
                have += row.tokens
    assert len(have) < 400
    assert 300 < came < 400
    front_end.next_reply()
    replay = front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, len(have)))
    assert isinstance(replay, Replay)
    assert have + replay.row.tokens == expected_tokens(row_of(insert))
