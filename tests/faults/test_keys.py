"""Keys, through a real worker: who gets in, and who may do what to whom."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.adapters import write_opaque_adapter
from tests.support.sockets import send_if_open
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine.errors import ConfigError, NotAuthorized
from zmqengine.protocol import codec, messages
from zmqengine.protocol.addresses import as_seen_from
from zmqengine.worker.wire.keys import KeyPair, load_key_pair, write_key_pair
from zmqengine_client import Client, CurveKeys
from zmqengine_client.keys import load_keys

WAIT_MS = 60_000


class Team:
    """A worker on tcp with keys, and people with and without one."""

    def __init__(self, directory: Path, make_worker: Callable[..., WorkerProcess]) -> None:
        self.directory = directory
        self.server = write_key_pair(directory, "worker")
        for name in ("authorized", "operators", "strangers"):
            (directory / name).mkdir()
        self.worker = make_worker(
            FakeEngineConfig(step_ms=2.0, prompt_cache_bytes=1 << 30),
            bind="tcp://127.0.0.1:0",
            supervise=False,
            server_key=str(self.server.secret),
            authorized_keys=str(directory / "authorized"),
            operator_keys=str(directory / "operators"),
        )
        wait_until(lambda: "listening" in self.worker.log, "the worker does not listen")
        self.worker.address = self.worker.log.split("address=")[1].split()[0]

    def keys(self, name: str, group: str = "authorized") -> CurveKeys:
        files = write_key_pair(self.directory / group, name)
        return load_keys(files.secret, self.server.public)

    def client(self, name: str, group: str = "authorized", **options: Any) -> Client:
        return self.worker.client(keys=self.keys(name, group), **options)

    def raw(self, keys: CurveKeys, kind: int, address: str, identity: bytes = b"") -> zmq.Socket[bytes]:
        """A socket of somebody who writes their own client."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        if identity:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        keys.apply(socket)
        socket.connect(as_seen_from(self.worker.address, address))
        return socket


@pytest.fixture
def team(tmp_path: Path, make_worker: Callable[..., WorkerProcess]) -> Team:
    return Team(tmp_path, make_worker)


def ask(socket: zmq.Socket[bytes], message: messages.Message) -> Any:
    socket.send_multipart(codec.encode(message))
    return codec.command_reply_decoder().decode(socket.recv_multipart())


def test_with_a_key_a_client_streams_and_a_stranger_never_reaches_the_actor(team: Team) -> None:
    """The stranger's handshake fails; the worker counts no command and no subscription of theirs."""
    with team.client("alice") as alice:
        request = RowRequest(0, [1, 2], 30, seed=5)
        assert alice.generate_tokens([1, 2], max_tokens=30, seed=5).read().tokens == expected_tokens(request)
        description = alice.describe()
        before = alice.status().numbers
        stranger = team.keys("mallory", "strangers")
        for kind, address in ((zmq.DEALER, description.cmd), (zmq.SUB, description.out)):
            socket = team.raw(stranger, kind, address)
            monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH)
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            else:
                send_if_open(socket, codec.encode(messages.Ping(1)))
            assert monitor.poll(WAIT_MS)
            socket.close(0)
        after = alice.status().numbers
        assert after["refused_subscriptions"] == before["refused_subscriptions"]
        assert after["rejected"] == before["rejected"]
        assert after["sessions"] == 1
    assert "stranger refused" in team.worker.log


def test_a_stolen_secret_is_worth_nothing_with_another_key(team: Team) -> None:
    """A session belongs to the key that opened it: no take-over, no subscription, no abort, no resume by another."""
    secret = os.urandom(32)
    with team.client("alice", session_secret=secret) as alice:
        stream = alice.generate_tokens([1, 2], max_tokens=400, seed=5, request_id="mine")
        next(stream)
        description = alice.describe()
        bob = team.keys("bob")
        cmd = team.raw(bob, zmq.DEALER, description.cmd)
        refusal = ask(cmd, messages.Hello(1, (1, 1), "bob", secret))
        assert isinstance(refusal, messages.Rejected)
        assert refusal.code == "not_authorized"
        for command in (
            messages.Abort(2, "mine"),
            messages.Resume(3, "mine", description.epoch, 0),
            messages.Bye(4),
        ):
            refused = ask(cmd, command)
            assert isinstance(refused, messages.Rejected)
            assert refused.code == "unknown_session"
        cmd.close(0)
        assert stream.read().tokens == expected_tokens(RowRequest(0, [1, 2], 400, seed=5))


def test_a_routing_id_cannot_be_inherited(team: Team) -> None:
    """A peer names itself: once the first connection is gone, another key with the same name finds no session."""
    with team.client("watcher") as watcher:
        description = watcher.wait_ready()
        out = codec.output_decoder()
        alice, bob = team.keys("alice"), team.keys("bob")
        cmd = team.raw(alice, zmq.DEALER, description.cmd, identity=b"desk-7")
        welcome = ask(cmd, messages.Hello(1, (1, 1), "alice", os.urandom(16)))
        sub = team.raw(alice, zmq.SUB, description.out)
        sub.setsockopt(zmq.SUBSCRIBE, welcome.topic.encode())
        assert isinstance(out.decode(sub.recv_multipart()[1:]), messages.Granted)
        assert isinstance(ask(cmd, messages.Ping(2)), messages.Done)
        cmd.close(0)
        # The worker's ROUTER takes the name again only when the first connection is gone; until then it drops it.
        refused = None
        for attempt in range(200):
            impostor = team.raw(bob, zmq.DEALER, description.cmd, identity=b"desk-7")
            impostor.setsockopt(zmq.RCVTIMEO, 200)
            try:
                refused = ask(impostor, messages.Ping(attempt))
                break
            except zmq.Again:
                continue
            finally:
                impostor.close(0)
        assert isinstance(refused, messages.Rejected)
        assert refused.code == "unknown_session"
        sub.close(0)


def test_another_sessions_topic_is_not_granted_to_another_key(team: Team) -> None:
    """Even whoever has seen a topic cannot read it."""
    with team.client("watcher") as watcher:
        description = watcher.wait_ready()
        cmd = team.raw(team.keys("alice"), zmq.DEALER, description.cmd)
        welcome = ask(cmd, messages.Hello(1, (1, 1), "alice", os.urandom(16)))
        before = watcher.status().numbers["refused_subscriptions"]
        spy = team.raw(team.keys("bob"), zmq.SUB, description.out)
        spy.setsockopt(zmq.SUBSCRIBE, welcome.topic.encode())
        wait_until(
            lambda: watcher.status().numbers["refused_subscriptions"] == before + 1, "the spy is not refused"
        )
        assert not spy.poll(0)
        spy.close(0)
        cmd.close(0)


def test_adapters_are_the_operators(team: Team) -> None:
    """Any key may use them; only an operator's loads and unloads one, from a directory of the worker's machine."""
    directory = write_opaque_adapter(team.directory / "adapter")
    with team.client("alice", "authorized") as client:
        client.wait_ready()
        for change in (lambda: client.load_adapter("odd", directory), lambda: client.unload_adapter("odd")):
            with pytest.raises(NotAuthorized, match="operator's key"):
                change()
        with team.client("operator", "operators") as operator:
            operator.load_adapter("odd", directory)
        assert len(client.generate_tokens([1, 2, 3], adapter="odd", max_tokens=5).read().tokens) == 5


def test_draining_needs_an_operators_key(team: Team) -> None:
    """Any key may ask for the status; only an operator's ends the worker."""
    with team.client("alice") as alice:
        alice.wait_ready()
        with pytest.raises(NotAuthorized):
            alice.drain()
        assert alice.describe().state == "ready"
        with team.client("operator", "operators") as operator:
            operator.drain()
    assert team.worker.process.wait(60) == 0


def test_a_key_given_while_the_worker_runs_is_enough(team: Team) -> None:
    """No restart to let somebody in."""
    with team.client("alice") as alice:
        alice.wait_ready()
        with team.client("late") as late:
            assert late.ping() < 20


def test_an_open_port_without_keys_is_refused(
    tmp_path: Path, make_worker: Callable[..., WorkerProcess]
) -> None:
    """Before anything is loaded, with a line that says how keys are made."""
    from zmqengine.config import WorkerConfig

    for bind in (
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://[::]:0",
        "tcp://10.1.2.3:7000",
        "tcp://somewhere:7000",
    ):
        with pytest.raises(ConfigError, match="keygen"):
            WorkerConfig(bind=bind)
    key: KeyPair = load_key_pair(write_key_pair(tmp_path, "worker").secret)
    assert key
    worker = make_worker(
        bind="tcp://0.0.0.0:0",
        server_key=str(tmp_path / "worker.key_secret"),
        authorized_keys=str(tmp_path),
        supervise=False,
    )
    wait_until(lambda: "listening" in worker.log, "a worker with keys does not listen on every interface")


def test_prompts_of_one_key_are_not_found_by_another(team: Team) -> None:
    """`cache_scope: key`: a key's other session finds a prompt, another key does not, whoever asks first."""
    prompt = list(range(5, 205))

    def cached_tokens(client: Client) -> int:
        return client.generate_tokens(prompt, max_tokens=1, cache_scope="key").read().cached_tokens

    alice = team.keys("alice")
    with (
        team.worker.client(keys=alice) as first,
        team.worker.client(keys=alice) as second,
        team.client("bob") as bob,
    ):
        assert cached_tokens(first) == 0
        assert cached_tokens(bob) == 0
        assert cached_tokens(second) == len(prompt) - 1
        assert cached_tokens(bob) == len(prompt) - 1


@pytest.mark.process
def test_the_sessions_of_a_removed_key_end(team: Team) -> None:
    """Within seconds, its stream included, and its open connections are served no more; those of others go on."""
    keys = team.keys("bob")
    with team.client("alice") as alice, team.worker.client(keys=keys) as bob:
        theirs = bob.generate_tokens([1, 2], max_tokens=4000, seed=5, ignore_eos=True)
        ours = alice.generate_tokens([1, 2], max_tokens=4000, seed=5, ignore_eos=True)
        cmd = team.raw(keys, zmq.DEALER, bob.describe().cmd)
        ctl = team.raw(keys, zmq.DEALER, team.worker.address)
        assert ask(cmd, messages.Ping(1)).call == 1
        assert codec.control_reply_decoder().decode(asked(ctl, messages.Describe(1))).call == 1
        next(theirs), next(ours)
        (team.directory / "authorized" / "bob.key").unlink()
        assert theirs.read().finish == "abort"
        for refused in (
            ask(cmd, messages.Hello(2, (1, 1), "bob", os.urandom(32))),
            codec.control_reply_decoder().decode(asked(ctl, messages.Describe(2))),
        ):
            assert isinstance(refused, messages.Rejected)
            assert refused.code == "not_authorized"
        ours.close()
        assert len(alice.generate_tokens([1], max_tokens=3).read().tokens) == 3
        cmd.close(0)
        ctl.close(0)
    assert "its key was removed" in team.worker.log


def asked(socket: zmq.Socket[bytes], message: messages.Message) -> list[bytes]:
    """The frames of the answer."""
    socket.send_multipart(codec.encode(message))
    return socket.recv_multipart()
