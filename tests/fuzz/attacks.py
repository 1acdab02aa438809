"""Attacks on the three sockets of a live worker: each is one call, and leaves its own sockets closed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import zmq

from tests.fuzz import seeds
from tests.support.sockets import send_if_open
from zmqengine.protocol import codec, messages
from zmqengine.protocol.addresses import Endpoints, tcp_host_port
from zmqengine.protocol.messages import MAGIC

ANSWER_MS = 60_000
REPEAT_MS = 3_000
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


class Attacker:
    """Somebody who can reach a worker's addresses and means no good."""

    def __init__(self, endpoints: Endpoints, random: Random) -> None:
        self._endpoints = endpoints
        self._random = random
        self._context: zmq.Context[Any] = zmq.Context()
        self._corpus = [path.read_bytes() for path in sorted(seeds.CORPUS.iterdir())]
        self.attacks: list[Callable[[], None]] = [
            self.hostile_commands,
            self.hostile_commands_in_a_session,
            self.hostile_control,
            self.subscriptions,
            self.messages_upstream,
            self.raw_tcp,
            self.raw_tcp_after_a_greeting,
            self.connections,
            self.oversized,
            self.take_overs,
        ]
        self.counts: dict[str, int] = {}

    def attack(self) -> None:
        """One attack."""
        chosen = self._random.choice(self.attacks)
        chosen()
        self.counts[chosen.__name__] = self.counts.get(chosen.__name__, 0) + 1

    def close(self) -> None:
        """Give up."""
        self._context.destroy(0)

    # --- cmd and ctl ---------------------------------------------------------------------------------------

    def hostile_commands(self) -> None:
        """Frames of every shape on cmd, without a session."""
        with self._socket(zmq.DEALER, self._endpoints.cmd) as cmd:
            self._send_hostile(cmd, count=30)

    def hostile_control(self) -> None:
        """The same on ctl, and a stranger's drain is not among them."""
        with self._socket(zmq.DEALER, self._endpoints.ctl) as ctl:
            self._send_hostile(ctl, count=30, never=(b"ZE1Q",))

    def hostile_commands_in_a_session(self) -> None:
        """A proper hello and subscription first, then rubbish, and inserts with extreme but allowed fields."""
        with (
            self._socket(zmq.DEALER, self._endpoints.cmd) as cmd,
            self._socket(zmq.SUB, self._endpoints.out) as sub,
        ):
            welcome = self._hello(cmd, os.urandom(16))
            sub.setsockopt(zmq.SUBSCRIBE, welcome.topic.encode())
            assert sub.poll(ANSWER_MS), "a well-formed subscription is granted beside all attacks"
            for number in range(10):
                send_if_open(cmd, [MAGIC + b"I", msgpack.packb(self._insert(welcome.epoch, f"r{number}"))])
                send_if_open(
                    cmd,
                    [MAGIC + b"A", msgpack.packb({"call": 1, "request": f"r{self._random.randrange(12)}"})],
                )
                resume = {"call": 1, "request": f"r{number}", "epoch": welcome.epoch, "from_index": 2**31 - 1}
                send_if_open(cmd, [MAGIC + b"U", msgpack.packb(resume)])
            self._send_hostile(cmd, count=10)

    def oversized(self) -> None:
        """A body just over the limit is refused; one far over it ends the connection."""
        with self._socket(zmq.DEALER, self._endpoints.cmd) as cmd:
            send_if_open(cmd, [MAGIC + b"I", bytes(self._random.choice([300_000, 3_000_000]))])
            send_if_open(cmd, [bytes(70_000)])
            send_if_open(cmd, [b""] * 1000)
            cmd.poll(200)

    def take_overs(self) -> None:
        """One secret from many connections at once."""
        secret = os.urandom(16)
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                self._hello(stack.enter_context(self._socket(zmq.DEALER, self._endpoints.cmd)), secret)

    # --- out -----------------------------------------------------------------------------------------------

    def subscriptions(self) -> None:
        """To everything, to prefixes, to guesses: nothing is ever received."""
        topics = [
            b"",
            b"s",
            b"s/",
            b"s/0",
            b"s/" + os.urandom(16).hex().encode() + b"/",
            os.urandom(5),
            bytes(5000),
        ]
        topics += [b"s/" + self._random.choice(b"0123456789abcdef").to_bytes(1, "big") for _ in range(4)]
        with self._socket(zmq.SUB, self._endpoints.out) as sub:
            for topic in topics:
                sub.setsockopt(zmq.SUBSCRIBE, topic)
                if self._random.random() < 0.5:
                    sub.setsockopt(zmq.UNSUBSCRIBE, topic)
            assert not sub.poll(50), "somebody else's frame"

    def messages_upstream(self) -> None:
        """An XSUB may send anything where subscriptions are expected."""
        with self._socket(zmq.XSUB, self._endpoints.out) as xsub:
            for _ in range(30):
                send_if_open(
                    xsub, [os.urandom(self._random.randrange(40)) for _ in range(self._random.randint(1, 3))]
                )
                send_if_open(xsub, [self._random.choice([b"\x00", b"\x01", b"\x02", b""]) + os.urandom(20)])
            assert not xsub.poll(50), "somebody else's frame"

    # --- below ZeroMQ --------------------------------------------------------------------------------------

    def raw_tcp(self) -> None:
        """Bytes that are no ZMTP, on any port."""
        self._send_raw(self._random.choice([b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\xff" * 64, b""]))

    def raw_tcp_after_a_greeting(self) -> None:
        """A proper greeting, then rubbish where the handshake should go on, or frames with false lengths."""
        follow = self._random.choice(
            [
                os.urandom(100),
                b"\x04\xff\xff",
                b"\x06" + b"\xff" * 8,
                b"\x02" + b"\x7f" + b"\xff" * 7,
                b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + os.urandom(30),
                b"\x04\x19\x05READY\x0bSocket-Type\xff\xff\xff\xff",
            ]
        )
        self._send_raw(GREETING + follow)

    def connections(self) -> None:
        """Many at once, half of them left without a word."""
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(socket.create_connection(self._address(), timeout=5))

    # --- parts ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _socket(self, kind: int, address: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 200)
        made.setsockopt(zmq.SNDTIMEO, 5_000)
        made.connect(address)
        try:
            yield made
        finally:
            made.close()

    def _hello(self, cmd: zmq.Socket[bytes], secret: bytes) -> messages.Welcome:
        """Repeated until it is answered, as any front-end does.

        On TCP a connection ends for the nonsense of an earlier one whose descriptor it was given, and what was on its
        way is lost with it.
        """
        for _ in range(ANSWER_MS // REPEAT_MS):
            cmd.send_multipart(codec.encode(messages.Hello(1, (1, 1), "mallory", secret)))
            if cmd.poll(REPEAT_MS):
                break
        else:
            raise AssertionError("a well-formed hello is answered beside all attacks")
        reply = codec.command_reply_decoder().decode(cmd.recv_multipart())
        assert isinstance(reply, messages.Welcome)
        return reply

    def _insert(self, epoch: bytes, request: str) -> dict[str, Any]:
        random = self._random
        return {
            "call": random.getrandbits(63), "request": request, "epoch": epoch,
            "prompt": [random.randrange(1200) for _ in range(random.choice([1, 5, 3000]))],
            "max_tokens": random.choice([1, 5, 1000, 2**31 - 1]),
            "emitted": [random.randrange(1000) for _ in range(random.choice([0, 0, 3]))],
            "sampling": random.choice([{}, {"temperature": 5e-324}, {"logit_bias": {2**31 - 1: 100.0}}, {"x": 1}]),
            "priority": random.choice([-100, 0, 100]),
            "deadline_ms": random.choice([None, 1, 50]),
            "logprobs": random.choice([None, 0, 20]),
        }  # fmt: skip

    def _send_hostile(self, to: zmq.Socket[bytes], *, count: int, never: tuple[bytes, ...] = ()) -> None:
        for _ in range(count):
            seed = bytearray(self._random.choice(self._corpus))
            for _ in range(self._random.randrange(4)):
                seed[self._random.randrange(len(seed))] = self._random.randrange(256)
            frames = [MAGIC + bytes(seed[1:2]), bytes(seed[2:])]
            shape = self._random.random()
            if shape < 0.1:
                frames = [os.urandom(self._random.randrange(30)) for _ in range(self._random.randint(1, 6))]
            elif shape < 0.2:
                frames[0] = os.urandom(self._random.randrange(6))
            if frames[0] not in never:
                send_if_open(to, frames)
        while to.poll(20):
            to.recv_multipart()

    def _address(self) -> tuple[str, int]:
        return tcp_host_port(
            self._random.choice([self._endpoints.ctl, self._endpoints.cmd, self._endpoints.out])
        )

    def _send_raw(self, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._address(), timeout=5) as raw:
            raw.sendall(data)
            raw.settimeout(0.02)
            raw.recv(1000)
