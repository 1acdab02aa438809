"""The control thread: it answers whatever happens, and what it answers is bounded in bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.worker.harness import CLOSE_MS
from zmqengine.protocol import codec
from zmqengine.protocol.addresses import Endpoints
from zmqengine.protocol.messages import (
    Describe,
    Description,
    Done,
    Drain,
    GetStatus,
    GetTokenizer,
    LoadAdapter,
    Message,
    Ping,
    Rejected,
    Status,
    TokenizerBundle,
)
from zmqengine.worker.intake.control import ControlHandler
from zmqengine.worker.intake.control_thread import ControlThread
from zmqengine.worker.process.wakeup import Wakeup
from zmqengine.worker.telemetry.shared_status import SharedStatus
from zmqengine.worker.wire.auth import Guard
from zmqengine.worker.wire.keys import load_key_pair, write_key_pair
from zmqengine.worker.wire.sockets import Sockets
from zmqengine.worker.wire.unread_replies import UnreadReplies

ANSWER_MS = 60_000


class Served:
    """A control thread on sockets of its own, and a DEALER to it."""

    def __init__(self, directory: Path) -> None:
        self.shared_status = SharedStatus(epoch=os.urandom(8), wakeup=Wakeup())
        self.sockets = Sockets(
            Endpoints(*(f"ipc://{directory}/{name}" for name in ("ctl", "cmd", "out"))), frame_bytes_max=4096
        )
        self.control = ControlThread(
            self.sockets.ctl, self.shared_status, name="test", endpoints=self.sockets.endpoints
        )
        self.context: zmq.Context[Any] = zmq.Context()

    def dealer(self, *, receive_max: int = 1000) -> Any:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, receive_max)
        dealer.connect(self.sockets.endpoints.ctl)
        return dealer

    def ask(self, dealer: Any, message: Message) -> Message:
        dealer.send_multipart(codec.encode(message))
        assert dealer.poll(ANSWER_MS), "ctl does not answer"
        return codec.control_reply_decoder().decode(dealer.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.control.stop()
        self.sockets.close(linger_ms=CLOSE_MS)
        self.shared_status.wakeup.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    serving = Served(tmp_path / "w")
    yield serving
    serving.close()


def test_once_a_drain_is_answered_nobody_is_told_that_the_worker_is_ready(served: Served) -> None:
    """Though the actor may be in a long step: a load balancer that drained it sends nothing more."""
    served.control.start()
    served.shared_status.state = "ready"
    dealer = served.dealer()
    assert isinstance(served.ask(dealer, Drain(1)), Done)
    for question in (Describe(2), GetStatus(3)):
        answer = served.ask(dealer, question)
        assert isinstance(answer, Description | Status)
        assert answer.state == "draining"


def test_the_actor_answers_when_it_has_done_what_an_operator_asked_for(served: Served) -> None:
    """The thread answers others meanwhile; until the model is there it refuses."""
    served.control.start()
    dealer, other = served.dealer(), served.dealer()
    load = LoadAdapter(1, "odd", "/adapters/odd")
    reply = served.ask(dealer, load)
    assert isinstance(reply, Rejected)
    assert reply.code == "not_ready"
    served.shared_status.state = "ready"
    dealer.send_multipart(codec.encode(load))
    assert isinstance(served.ask(other, Ping(2)), Done)
    while not served.shared_status.adapter_calls:
        assert isinstance(served.ask(other, Ping(3)), Done)
    (call,) = served.shared_status.adapter_calls
    assert call[1:] == (1, "odd", "/adapters/odd")
    served.shared_status.answer(call.route, Done(1, served.shared_status.epoch))
    assert dealer.poll(ANSWER_MS), "the answer is not sent"
    assert codec.control_reply_decoder().decode(dealer.recv_multipart()) == Done(
        1, served.shared_status.epoch
    )
    assert not other.poll(0)


@pytest.mark.parametrize("broken", ["_description", "handle"])
def test_a_request_that_fails_is_refused_and_the_thread_answers_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """A defect in one answer must not end describe, drain and the key check for everybody."""
    served.control.start()
    dealer = served.dealer()
    with monkeypatch.context() as patch:
        patch.setattr(ControlHandler, broken, lambda *_: 1 / 0)
        reply = served.ask(dealer, Describe(7))
    assert isinstance(reply, Rejected)
    assert (reply.code, reply.call) == ("internal", 7)
    assert any(record.exc_info for record in caplog.records)
    assert isinstance(served.ask(dealer, Describe(8)), Description)


def test_a_loop_that_fails_begins_again_and_is_counted(served: Served) -> None:
    """Whatever is served beside ctl may fail: the thread goes on, and status says how often it had to."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    class Failing:
        def fileno(self) -> int:
            return reader

        def check(self) -> object:
            try:
                os.read(reader, 1)
            except BlockingIOError:
                return None
            raise ValueError("a defect")

    served.control.watch(Failing())
    served.control.start()
    dealer = served.dealer()
    os.write(writer, b"!")
    while served.shared_status.control_failures == 0:
        assert isinstance(served.ask(dealer, Ping(1)), Done)
    reply = served.ask(dealer, GetStatus(2))
    assert reply.numbers["control_failures"] == 1  # type: ignore[attr-defined]
    os.close(writer)
    os.close(reader)


def test_a_key_check_that_fails_lets_nobody_in_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer the REP socket would take no further question."""
    keys = load_key_pair(write_key_pair(tmp_path, "somebody").secret)
    context: zmq.Context[Any] = zmq.Context()
    handler = Guard(context, keys, tmp_path)
    asker = context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    question = [b"1.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"CURVE", bytes(32)]
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "_is_known", lambda *_: 1 / 0)
        asker.send_multipart(question)
        handler.check()
        assert asker.recv_multipart()[2] == b"500"
    asker.send_multipart(question)
    handler.check()
    assert asker.recv_multipart()[2] == b"400"
    handler.close()
    context.destroy(linger=0)


def test_long_replies_that_nobody_reads_are_bounded_in_bytes(served: Served) -> None:
    """A tokenizer of megabytes asked for again and again: one waits, the rest is refused, and others get theirs."""
    size = 4 << 20
    served.shared_status.tokenizer = TokenizerBundle(0, "h", os.urandom(size), None, [0])
    served.control.start()
    glutton = served.dealer(receive_max=1)
    for call in range(1, 41):
        glutton.send_multipart(codec.encode(GetTokenizer(call)))
    other = served.dealer()
    assert isinstance(served.ask(other, GetTokenizer(1)), TokenizerBundle)
    kinds: list[type] = []
    while kinds.count(TokenizerBundle) < 1 or kinds.count(Rejected) < 20:
        assert glutton.poll(ANSWER_MS), kinds
        kinds.append(type(codec.control_reply_decoder().decode(glutton.recv_multipart())))


def test_room_comes_back_when_replies_were_read(tmp_path: Path) -> None:
    """What libzmq has handed over counts no more."""
    context: zmq.Context[Any] = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    router.bind(f"ipc://{tmp_path}/s")
    dealer.connect(f"ipc://{tmp_path}/s")
    dealer.send(b"hello")
    route = router.recv_multipart()[0]
    replies = UnreadReplies(router, bytes_max=1 << 20)
    assert replies.has_room(route, 1 << 19)
    sent = 0
    while replies.has_room(route, 1 << 19):
        assert sent < 100, "it is never full"
        assert replies.send(route, b"head", bytes(1 << 19))
        sent += 1
    assert replies.has_room(b"another", 1 << 19)
    for _ in range(sent):
        assert dealer.poll(ANSWER_MS)
        dealer.recv_multipart()
    while not replies.has_room(route, 1 << 19):
        assert not dealer.poll(10)
    context.destroy(linger=0)
