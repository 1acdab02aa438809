"""What front-ends send is read for a bounded time, refused cheaply, and ends at the message that was wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from tests.worker.harness import ARRIVAL_MS_MAX, FrontEnd, Harness
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import (
    Abort,
    Ack,
    Bye,
    Done,
    Granted,
    Hello,
    Ping,
    Rejected,
    Replay,
    Resume,
    Welcome,
)
from zmqengine.worker.intake import inbox
from zmqengine.worker.intake.commands import CommandHandler
from zmqengine.worker.wire.refused_topics import REFUSED_MAX

MakeHarness = Callable[..., Harness]


@pytest.fixture
def stranger() -> Any:
    """A context for sockets that do not keep to the protocol."""
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def upstream(harness: Harness, context: zmq.Context[Any]) -> Any:
    """An XSUB on out: it may send anything where subscriptions are expected."""
    xsub = context.socket(zmq.XSUB)
    xsub.setsockopt(zmq.RECONNECT_IVL, -1)
    xsub.connect(harness.sockets.endpoints.out)
    return xsub


def test_a_pass_reads_a_bounded_number_of_subscriptions(
    harness: Harness, stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of subscriptions takes its share of a pass, and the rest waits for the next."""
    monkeypatch.setattr(inbox, "MESSAGES_MAX", 3)
    xsub = upstream(harness, stranger)
    for index in range(10):
        xsub.send(b"\x01nobody's %d" % index)
    assert harness.sockets.out.poll(ARRIVAL_MS_MAX)
    harness.run_until(lambda: harness.actor.counters.refused_subscriptions >= 1)
    assert harness.actor.counters.refused_subscriptions <= 3
    harness.run_until(lambda: harness.actor.counters.refused_subscriptions == 10)


@pytest.mark.parametrize("bound", ["SUBSCRIPTIONS_SECONDS_MAX", "COMMANDS_SECONDS_MAX"])
def test_the_clock_is_looked_at_for_every_message(
    harness: Harness, stranger: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """64 long commands, or subscriptions, would be far over the bound: after the time is up not one more is read."""
    monkeypatch.setattr(inbox, bound, 0.0)
    front_end = harness.front_end()
    xsub = upstream(harness, stranger)
    for index in range(8):
        front_end.send(Ping(1000 + index))
        xsub.send(b"\x01nobody's %d" % index)
    counters = harness.actor.counters
    read = "refused_subscriptions" if bound.startswith("SUB") else "commands"
    before = getattr(counters, read)
    at_start = before

    def all_read() -> bool:
        nonlocal at_start
        at_end = getattr(counters, read)
        assert at_end <= at_start + 1
        at_start = at_end
        return bool(at_end == before + 8)

    harness.run_until(all_read)


def test_a_peer_that_goes_on_with_nonsense_on_out_is_disconnected(harness: Harness, stranger: Any) -> None:
    """libzmq keeps every refused topic until the connection ends: so it ends, and the honest stream goes on."""
    front_end = harness.front_end()
    front_end.accepted("r", max_tokens=200)
    xsub = upstream(harness, stranger)
    monitor = xsub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for index in range(REFUSED_MAX):
        xsub.send(b"\x01nobody's %d" % index)
    harness.run_until(lambda: monitor.poll(0))
    assert front_end.wait_for_end("r")[0].finish == "length"


def test_a_few_refused_topics_end_no_connection(harness: Harness, stranger: Any) -> None:
    """A front-end that comes back to a restarted worker brings its old topics along."""
    xsub = upstream(harness, stranger)
    monitor = xsub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for index in range(REFUSED_MAX - 1):
        xsub.send(b"\x01nobody's %d" % index)
    harness.run_until(lambda: harness.actor.counters.refused_subscriptions == REFUSED_MAX - 1)
    harness.passes(20)
    assert not monitor.poll(0)


def test_a_subscription_of_megabytes_never_reaches_the_worker(harness: Harness, stranger: Any) -> None:
    """libzmq's index of topics takes a hundred times their bytes: a connection that sends a long one is ended."""
    xsub = upstream(harness, stranger)
    monitor = xsub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    # Not a subscription in name: the sender's own index of topics would not survive it.
    xsub.send(b"\x02" + bytes(1 << 20))
    assert monitor.poll(ARRIVAL_MS_MAX)
    harness.passes(20)
    assert harness.actor.counters.refused_subscriptions == 0


def test_nobody_is_granted_the_topic_of_another_by_a_message_that_is_no_subscription(
    harness: Harness, stranger: Any
) -> None:
    """libzmq counts such a message as a subscription of the next subscriber: the grants after it would be shifted."""
    victim = harness.front_end(live=False)
    victim.say_hello()
    assert victim.welcome is not None
    thief_session = harness.front_end(live=False)
    thief_session.say_hello()
    assert thief_session.welcome is not None
    xsub = upstream(harness, stranger)
    xsub.send(b"\x02no subscription")
    assert harness.sockets.out.poll(ARRIVAL_MS_MAX)
    victim.out.subscribe(victim.welcome.topic)
    victim.out.connect(harness.sockets.endpoints.out)
    _arrived(harness)
    xsub.send(b"\x01" + thief_session.welcome.topic.encode())
    _arrived(harness)
    harness.run_until(lambda: victim.read() or any(isinstance(output, Granted) for output in victim.outputs))
    victim.accepted("r", max_tokens=30)
    victim.wait_for_end("r")
    while xsub.poll(0):
        topic, *_ = xsub.recv_multipart()
        assert topic.decode() != victim.welcome.topic, "somebody else's stream"


def test_who_unsubscribes_after_such_a_message_takes_nobody_elses_subscription(
    harness: Harness, stranger: Any
) -> None:
    """The same shift, the other way: the topic would be withdrawn from the front-end that spoke next."""
    front_end = harness.front_end()
    assert front_end.welcome is not None
    topic = front_end.welcome.topic.encode()
    front_end.out.subscribe("nobody's")
    harness.run_until(lambda: harness.actor.counters.refused_subscriptions == 1)
    second = upstream(harness, stranger)
    second.send(b"\x01" + topic)
    (session,) = harness.actor.sessions
    harness.run_until(lambda: session.subscribers == 2)
    xsub = upstream(harness, stranger)
    xsub.send(b"\x02no subscription")
    _arrived(harness)
    second.send(b"\x00" + topic)
    _arrived(harness)
    front_end.out.unsubscribe("nobody's")
    _arrived(harness)
    harness.run_until(lambda: session.subscribers == 1)
    front_end.accepted("r", max_tokens=5)
    assert front_end.wait_for_end("r")[0].finish == "length"


def _arrived(harness: Harness) -> None:
    """Let libzmq take in what was sent to out, while nobody reads it. If it takes longer, the test shows less."""
    until_s = time.monotonic() + 0.1
    while time.monotonic() < until_s:
        # This look is what takes it in.
        harness.sockets.out.getsockopt(zmq.EVENTS)
        time.sleep(0.01)


def test_a_message_of_very_many_parts_is_refused_at_once_and_dropped_bit_by_bit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal does not wait for the last part, and no pass reads them all; what comes after is understood."""
    front_end = harness.front_end()
    monkeypatch.setattr(inbox, "MESSAGES_MAX", 10)
    front_end.send_raw(*([b"ZE1P"] + [b""] * 200))
    reply = front_end.next_reply()
    assert isinstance(reply, Rejected)
    assert reply.code == "bad_request"
    assert isinstance(front_end.call(Ping(front_end.next_call())), Done)


def test_what_follows_in_such_a_message_is_no_command_of_another_connection(harness: Harness) -> None:
    """The parts that are dropped may look like a command with somebody else's routing id before it."""
    victim, hostile = harness.front_end(), harness.front_end(live=False)
    (session,) = harness.actor.sessions
    victim.accepted("r", max_tokens=50)
    hostile.send_raw(b"ZE1P", b"", b"", session.route, *encode(Abort(1, "r")))
    reply = hostile.next_reply()
    assert isinstance(reply, Rejected)
    assert reply.code == "bad_request"
    assert victim.wait_for_end("r")[0].finish == "length"


HANDLERS = {
    "_insert": lambda front_end: front_end.insert_message("broken"),
    "_abort": lambda front_end: Abort(front_end.next_call(), "broken"),
    "_resume": lambda front_end: Resume(front_end.next_call(), "broken", front_end.epoch, 0),
    "_ack": lambda front_end: Ack(front_end.next_call(), ["broken"]),
    "_hello": lambda front_end: Hello(front_end.next_call(), (1, 1), "x", front_end.secret),
    "_handle_in_session": lambda front_end: Bye(front_end.next_call()),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_whichever_handler_fails_the_command_is_refused_and_the_worker_serves_on(
    make_harness: MakeHarness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    handler: str,
) -> None:
    """A defect of ours costs one command, not a worker: `internal`, and a log line with the request."""
    harness = make_harness()
    honest, other = harness.front_end(), harness.front_end()
    honest.accepted("r", max_tokens=20)

    def fail(*_: object) -> None:
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(CommandHandler, handler, fail)
        other.send(HANDLERS[handler](other))
        reply = other.next_reply()
    assert isinstance(reply, Rejected)
    assert reply.code == "internal"
    assert reply.call > 0
    (record,) = [record for record in caplog.records if "internal error" in record.message]
    assert record.exc_info
    if handler != "_hello" and handler != "_ack" and handler != "_handle_in_session":
        assert record.__dict__["request"] == "broken"
    assert honest.wait_for_end("r")[0].finish == "length"
    assert isinstance(other.say_hello(), Welcome)


def test_a_subscription_that_fails_is_dropped_and_the_worker_serves_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge around out."""
    front_end = harness.front_end(live=False)
    front_end.say_hello()
    with monkeypatch.context() as patch:
        patch.setattr(type(harness.actor.sessions), "subscribed", lambda *_: 1 / 0)
        assert front_end.welcome is not None
        front_end.out.subscribe(front_end.welcome.topic)
        front_end.out.connect(harness.sockets.endpoints.out)
        assert harness.sockets.out.poll(ARRIVAL_MS_MAX)
        harness.passes(5)
    second: FrontEnd = harness.front_end()
    second.accepted("r", max_tokens=5)
    assert second.wait_for_end("r")[0].finish == "length"


def test_whoever_does_not_read_long_replies_gets_no_more_of_them(make_harness: MakeHarness) -> None:
    """A command of 60 bytes asks for hundreds of thousands: what one connection has not read is bounded."""
    harness = make_harness(FakeEngineConfig(instant=True, context_tokens=100_000))
    front_end = harness.front_end(live=False)
    front_end.cmd.close()
    front_end.cmd = front_end.context.socket(zmq.DEALER)
    front_end.cmd.setsockopt(zmq.RCVHWM, 1)
    front_end.cmd.connect(harness.sockets.endpoints.cmd)
    front_end.say_hello()
    front_end.subscribe()
    front_end.accepted("r", max_tokens=50_000)
    front_end.wait_for_end("r")
    before = len(front_end.replies)
    for _ in range(40):
        front_end.send(Resume(front_end.next_call(), "r", front_end.epoch, 0))
    harness.read_commands(40)
    harness.run_until(lambda: front_end.read() or len(front_end.replies) == before + 40)
    refused = [reply for reply in front_end.replies if isinstance(reply, Rejected)]
    assert {reply.code for reply in refused} == {"overloaded"}
    assert 20 < len(refused) < 40
    # That they were read, libzmq hears in its own time.
    harness.run_until(
        lambda: isinstance(front_end.call(Resume(front_end.next_call(), "r", front_end.epoch, 0)), Replay)
    )


def test_a_flood_of_wrong_commands_holds_up_nobody(make_harness: MakeHarness) -> None:
    """Each is refused, a bounded number in a pass; the others are served meanwhile."""
    harness = make_harness(FakeEngineConfig())
    honest, hostile = harness.front_end(), harness.front_end(live=False)
    for _ in range(100):
        hostile.send_raw(b"ZE1P", b"\xc1")
    honest.accepted("r", max_tokens=5)
    assert honest.wait_for_end("r")[0].finish == "length"


@pytest.mark.skipif(
    sys.platform != "linux", reason="this system does not tell which process is at the other end"
)
def test_no_process_gets_more_than_its_share_of_the_sessions(make_harness: MakeHarness) -> None:
    """Half of them, so that newcomers still get in; a session that is known may be taken over at any time."""
    harness = make_harness(sessions_max=20)
    holders = [harness.front_end(live=False) for _ in range(10)]
    for holder in holders:
        holder.say_hello()
    eleventh = harness.front_end(live=False)
    reply = eleventh.call(Hello(eleventh.next_call(), (1, 1), "x", eleventh.secret))
    assert isinstance(reply, Rejected)
    assert (reply.code, bool(reply.retry_after_ms)) == ("overloaded", True)
    assert isinstance(harness.front_end(live=False, secret=holders[0].secret).say_hello(), Welcome)
    holders[1].call(Bye(holders[1].next_call()))
    assert isinstance(eleventh.say_hello(), Welcome)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, harness.sockets.endpoints.cmd], stdout=subprocess.PIPE
    ) as other:
        harness.run_until(lambda: other.poll() is not None)
        assert other.stdout is not None
        assert other.stdout.read().startswith(b"ZE1h")


OTHER_PROCESS = """
import sys, zmq, msgpack
cmd = zmq.Context().socket(zmq.DEALER)
cmd.linger = 0
cmd.connect(sys.argv[1])
body = {"call": 1, "protocol": [1, 1], "client": "newcomer", "session_secret": bytes(16)}
cmd.send_multipart([b"ZE1H", msgpack.packb(body)])
assert cmd.poll(60_000)
print(cmd.recv_multipart()[0].decode(), flush=True)
"""
