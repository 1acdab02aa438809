"""CURVE and ZAP with real sockets, without a worker behind them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from tests.support.sockets import send_if_open
from zmqengine.errors import ConfigError
from zmqengine.worker.wire.auth import ZAP_ADDRESS, Guard
from zmqengine.worker.wire.keys import KeyPair, load_key_pair, write_key_pair

WAIT_MS = 60_000
SETTLED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class Door:
    """A ROUTER and an XPUB behind a ZAP handler that a thread serves."""

    def __init__(self, tmp_path: Path) -> None:
        self.authorized = tmp_path / "authorized"
        self.operators = tmp_path / "operators"
        self.authorized.mkdir()
        self.operators.mkdir()
        self.server = load_key_pair(write_key_pair(tmp_path, "worker").secret)
        self.context: zmq.Context[Any] = zmq.Context()
        self.zap = Guard(self.context, self.server, self.authorized, self.operators)
        self.monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}
        self.router = self._guarded(zmq.ROUTER)
        self.publisher = self._guarded(zmq.XPUB)
        self._stop_reader, self._stop_writer = (self.context.socket(zmq.PAIR) for _ in range(2))
        self._stop_reader.bind("inproc://stop")
        self._stop_writer.connect("inproc://stop")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def client(self, keys: KeyPair, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """A socket connected with these keys to the ROUTER, or for SUB to the XPUB."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.connect(socket, self.publisher if kind == zmq.SUB else self.router)
        return socket

    def connect(self, socket: zmq.Socket[bytes], target: zmq.Socket[bytes]) -> None:
        """Connect, and watch the handshake from its start."""
        self.monitors[socket] = socket.get_monitor_socket(SETTLED)
        socket.connect(target.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0"))  # type: ignore[arg-type]

    def outcome(self, socket: zmq.Socket[bytes]) -> int:
        """The first event that settles whether a connection of this socket stands."""
        assert self.monitors[socket].poll(WAIT_MS)
        return int.from_bytes(self.monitors[socket].recv_multipart()[0][:2], "little")

    def stop_answering(self) -> None:
        """The handler is gone, as when its thread has died."""
        if self._thread.is_alive():
            self._stop_writer.send(b"")
            self._thread.join(WAIT_MS / 1000)
            assert not self._thread.is_alive()
        self.zap.close()

    def close(self) -> None:
        self.stop_answering()
        self.context.destroy(0)

    def _guarded(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.zap.secure(socket)
        self.monitors[socket] = socket.get_monitor_socket(SETTLED)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_reader, zmq.POLLIN)
        poller.register(self.zap.fileno(), zmq.POLLIN)
        while self._stop_reader not in (ready := dict(poller.poll())):
            if self.zap.fileno() in ready:
                self.zap.check()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    opened = Door(tmp_path)
    yield opened
    opened.close()


def new_keys(tmp_path: Path, name: str) -> KeyPair:
    return load_key_pair(write_key_pair(tmp_path, name).secret)


def test_a_known_key_enters_and_its_frames_carry_it(door: Door) -> None:
    """`User-Id` is the key itself, on commands and on subscriptions, so that a session can be bound to it."""
    keys = new_keys(door.authorized, "alice")
    door.client(keys).send(b"hello")
    route, body = door.router.recv_multipart(copy=False)
    assert body.bytes == b"hello"
    assert body.get("User-Id") == route.get("User-Id") == keys.public.decode()
    subscriber = door.client(keys, zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"topic")
    subscription = door.publisher.recv(copy=False)
    assert subscription.bytes == b"\x01topic"
    assert subscription.get("User-Id") == keys.public.decode()


def test_a_stranger_is_refused_and_nothing_of_theirs_arrives(door: Door, tmp_path: Path) -> None:
    """A correct CURVE handshake with a key that is in no file ends in a refusal, on every socket."""
    stranger = new_keys(tmp_path, "stranger")
    dealer = door.client(stranger)
    send_if_open(dealer, [b"let me in"])
    assert door.outcome(dealer) == zmq.Event.HANDSHAKE_FAILED_AUTH
    assert door.outcome(door.client(stranger, zmq.SUB)) == zmq.Event.HANDSHAKE_FAILED_AUTH
    friend = door.client(new_keys(door.authorized, "alice"))
    friend.send(b"hello")
    assert door.router.recv_multipart()[1] == b"hello"
    assert not door.router.poll(0)


def test_without_curve_nobody_gets_through_the_handshake(door: Door) -> None:
    """A plain socket reaches the port and no further."""
    plain = door.context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    door.connect(plain, door.router)
    send_if_open(plain, [b"hello"])
    assert door.outcome(door.router) == zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    assert not door.router.poll(0)


def test_a_worker_with_another_key_is_not_trusted(door: Door, tmp_path: Path) -> None:
    """A front-end that expects one worker does not talk to another at its address."""
    keys = new_keys(door.authorized, "alice")
    door.server = new_keys(tmp_path, "impostor")
    client = door.client(keys)
    send_if_open(client, [b"secret prompt"])
    assert door.outcome(door.router) == zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    assert not door.router.poll(0)


def test_a_key_added_or_removed_counts_from_the_next_connection(door: Door) -> None:
    """No restart is needed to let somebody in, or to keep them out."""
    alice = new_keys(door.authorized, "alice")
    assert door.outcome(door.client(alice)) == zmq.Event.HANDSHAKE_SUCCEEDED
    (door.authorized / "alice.key").unlink()
    assert door.outcome(door.client(alice)) == zmq.Event.HANDSHAKE_FAILED_AUTH
    bob = new_keys(door.authorized, "bob")
    assert door.outcome(door.client(bob)) == zmq.Event.HANDSHAKE_SUCCEEDED


def test_an_operator_may_connect_and_is_told_apart(door: Door, tmp_path: Path) -> None:
    """The directory of operators lets in too, and only its keys are operators."""
    operator, alice = new_keys(door.operators, "operator"), new_keys(door.authorized, "alice")
    assert door.outcome(door.client(operator)) == zmq.Event.HANDSHAKE_SUCCEEDED
    assert door.zap.is_operator(operator.public.decode())
    assert not door.zap.is_operator(alice.public.decode())
    assert not door.zap.is_operator("")
    context: zmq.Context[Any] = zmq.Context()
    try:
        alone = Guard(context, door.server, door.authorized)
        assert not alone.is_operator(alice.public.decode())
        alone.close()
    finally:
        context.destroy(0)


def test_a_file_that_is_no_key_keeps_nobody_else_out(door: Door) -> None:
    """Rubbish in the directory is left out, and so is a secret file put there by mistake."""
    (door.authorized / "notes.key").write_text("not a key")
    (door.authorized / "README").write_text("keys of the team")
    assert door.outcome(door.client(new_keys(door.authorized, "alice"))) == zmq.Event.HANDSHAKE_SUCCEEDED


def test_a_directory_that_vanishes_lets_nobody_in(door: Door) -> None:
    """It fails closed, and opens again when the directory is back."""
    alice = new_keys(door.authorized, "alice")
    assert door.outcome(door.client(alice)) == zmq.Event.HANDSHAKE_SUCCEEDED
    door.authorized.rename(door.authorized.with_name("away"))
    assert door.outcome(door.client(alice)) == zmq.Event.HANDSHAKE_FAILED_AUTH
    door.authorized.with_name("away").rename(door.authorized)
    assert door.outcome(door.client(alice)) == zmq.Event.HANDSHAKE_SUCCEEDED


def test_without_a_handler_nobody_gets_in(tmp_path: Path) -> None:
    """The sockets ask for a handler's word: that there is none is not a yes."""
    server, alice = new_keys(tmp_path, "worker"), new_keys(tmp_path, "alice")
    context: zmq.Context[Any] = zmq.Context()
    try:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        guard = Guard(context, server, tmp_path)
        guard.close()
        guard.secure(router)
        # libzmq may wait for the handler: by default for half a minute.
        router.setsockopt(zmq.HANDSHAKE_IVL, 500)
        monitor = router.get_monitor_socket(SETTLED)
        router.bind("tcp://127.0.0.1:*")
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, alice.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, alice.secret)
        dealer.connect(router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0"))
        send_if_open(dealer, [b"hello"])
        assert monitor.poll(WAIT_MS)
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        assert not router.poll(0)
    finally:
        context.destroy(0)


@pytest.mark.parametrize(
    "question",
    [
        [],
        [b""],
        [b"2.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"CURVE", b"x" * 32],
        [b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", b"x" * 32],
        [b"1.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"NULL"],
        [b"1.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"1.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"CURVE", b"x" * 31],
        [b"1.0", b"1", b"zmqengine", b"127.0.0.1", b"", b"CURVE", b"x" * 32],
    ],
)
def test_a_question_that_is_not_about_a_known_key_is_answered_no(door: Door, question: list[bytes]) -> None:
    """Whatever is asked in process, the handler answers, and never with 200."""
    asker = door.context.socket(zmq.REQ)
    asker.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    asker.connect(ZAP_ADDRESS)
    asker.send_multipart(question or [b""])
    answer = asker.recv_multipart()
    assert len(answer) == 6
    assert answer[0] == b"1.0"
    assert answer[2] in (b"400", b"500")


def test_a_known_key_opens_no_door_but_ours(door: Door) -> None:
    """Other sockets of the process may ask the same handler: their domain is not ours to open."""
    key = z85.decode(new_keys(door.authorized, "alice").public)
    asker = door.context.socket(zmq.REQ)
    asker.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    asker.connect(ZAP_ADDRESS)
    for domain, status in ((b"zmqengine", b"200"), (b"other", b"400")):
        asker.send_multipart([b"1.0", b"1", domain, b"127.0.0.1", b"", b"CURVE", key])
        assert asker.recv_multipart()[2] == status


def test_a_missing_directory_stops_the_worker_at_once(tmp_path: Path) -> None:
    """A mistyped --authorized-keys is said at the start, not when the first front-end fails."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        with pytest.raises(ConfigError, match="cannot read the keys"):
            Guard(context, new_keys(tmp_path, "worker"), tmp_path / "missing")
    finally:
        context.destroy(0)
