"""One hostile front-end in a process of its own: it does one bad thing to a worker, as fast as it can, for a while.

    python -m tests.hostile.attack subscriptions_many ipc:///tmp/.../ctl 20

It uses sockets and bytes alone, as a front-end in any language might.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import zmq

from tests.support.hostile_constraints import HOSTILE

HALF_OPEN = 400


class Peer:
    """A hostile peer's sockets to one worker."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.context: zmq.Context[Any] = zmq.Context()
        self.until_s = time.monotonic() + seconds
        self._calls = itertools.count(1)
        ctl = self.socket(zmq.DEALER, address)
        ctl.send_multipart([b"ZE1D", msgpack.packb({"call": 1})])
        assert ctl.poll(60_000), "the worker does not say where its sockets are"
        described = msgpack.unpackb(ctl.recv_multipart()[1])
        self.cmd_address, self.out_address = described["cmd"], described["out"]
        self.epoch = described["epoch"]
        ctl.close(0)

    def socket(self, kind: int, address: str, **options: int) -> Any:
        made = self.context.socket(kind)
        made.linger = 0
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(address)
        return made

    def cmd(self, **options: int) -> Any:
        return self.socket(zmq.DEALER, self.cmd_address, **options)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s

    def message(self, kind: str, **fields: Any) -> list[bytes]:
        return [b"ZE1" + kind.encode(), msgpack.packb({"call": next(self._calls), **fields})]

    def hello(self) -> list[bytes]:
        return self.message("H", protocol=[1, 1], client="mallory", session_secret=os.urandom(16))

    def insert(self, request: str, **fields: Any) -> list[bytes]:
        fields = {"prompt": [5, 9, 2], "max_tokens": 30} | fields
        return self.message("I", request=request, epoch=self.epoch, **fields)

    def session(self) -> tuple[Any, Any]:
        """A cmd and an out socket with a session that may insert."""
        cmd = self.cmd()
        cmd.send_multipart(self.hello())
        assert cmd.poll(60_000), "hello is not answered"
        welcome = msgpack.unpackb(cmd.recv_multipart()[1])
        out = self.socket(zmq.SUB, self.out_address)
        out.setsockopt_string(zmq.SUBSCRIBE, welcome["topic"])
        assert out.poll(60_000), "no grant"
        return cmd, out

    def send(self, to: Any, frames: list[bytes]) -> None:
        try:
            to.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            time.sleep(0.0002)

    def flood(self, to: Any, messages: Iterator[list[bytes]], *, reads: bool = True) -> None:
        """Send without end; take the answers away, or leave them."""
        for frames in messages:
            if not self.goes_on:
                return
            self.send(to, frames)
            while reads and to.poll(0):
                to.recv_multipart()


def nothing(peer: Peer) -> None:
    """No attack: what the machine itself does to the stream."""
    while peer.goes_on:
        time.sleep(0.1)


def subscriptions_many(peer: Peer) -> None:
    """Another topic each time."""
    xsub = peer.socket(zmq.XSUB, peer.out_address)
    peer.flood(xsub, ([b"\x01nobody's %d" % index] for index in itertools.count()), reads=False)


def subscriptions_same(peer: Peer) -> None:
    """The same one again and again."""
    xsub = peer.socket(zmq.XSUB, peer.out_address)
    peer.flood(xsub, ([b"\x01nobody's"] for _ in itertools.count()), reads=False)


def subscriptions_long(peer: Peer) -> None:
    """32 MB each, which no SUB socket would survive to send: by hand."""
    while peer.goes_on:
        with contextlib.suppress(OSError), _raw(peer.out_address) as raw:
            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
            raw.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")
            raw.sendall(b"\x02" + (1 + (32 << 20)).to_bytes(8, "big") + b"\x01")
            for _ in range(32):
                raw.sendall(b"t" * (1 << 20))


def not_subscriptions(peer: Peer) -> None:
    """Messages where subscriptions are expected."""
    xsub = peer.socket(zmq.XSUB, peer.out_address)
    peer.flood(xsub, ([b"\x02", b"x"] for _ in itertools.count()), reads=False)


def hellos(peer: Peer) -> None:
    """A new session on a new connection each time."""
    held: list[Any] = []
    while peer.goes_on:
        # A socket that was closed is not gone at once: then there is none to be had for a moment.
        with contextlib.suppress(zmq.ZMQError):
            held.append(peer.cmd())
            peer.send(held[-1], peer.hello())
        if len(held) > 200:
            held.pop(0).close(0)


def inserts(peer: Peer) -> None:
    """As much work as it takes."""
    cmd, _out = peer.session()
    peer.flood(cmd, (peer.insert(f"i{index}") for index in itertools.count()))


def aborts(peer: Peer) -> None:
    """Insert, abort, forget."""
    cmd, _out = peer.session()

    def messages() -> Iterator[list[bytes]]:
        for index in itertools.count():
            yield peer.insert(f"a{index}", deadline_ms=86_400_000)
            yield peer.message("A", request=f"a{index}")
            yield peer.message("K", requests=[f"a{index}"])

    peer.flood(cmd, messages())


def resumes(peer: Peer, *, reads: bool = True) -> None:
    """All of a long output, again and again."""
    cmd, _out = peer.session()
    cmd.send_multipart(peer.insert("long", max_tokens=1500, logprobs=20, ignore_eos=True))
    time.sleep(0.5)
    resume = {"request": "long", "epoch": peer.epoch, "from_index": 0}
    peer.flood(cmd, (peer.message("U", **resume) for _ in itertools.count()), reads=reads)


def resumes_unread(peer: Peer) -> None:
    """The same, and the answers are never read."""
    resumes(peer, reads=False)


def pings(peer: Peer) -> None:
    """Without a session."""
    peer.flood(peer.cmd(), (peer.message("P") for _ in itertools.count()))


def malformed(peer: Peer) -> None:
    """Bodies that cannot be decoded, on cmd and ctl in turn."""
    cmd, ctl = peer.cmd(), peer.socket(zmq.DEALER, peer.address)
    bodies = [b"\xc1", b"\x81\xa4call\xff", os.urandom(40), b"", msgpack.packb({"call": -1})]
    for body in itertools.cycle(bodies):
        if not peer.goes_on:
            return
        for to in (cmd, ctl):
            peer.send(to, [b"ZE1I", body])
            while to.poll(0):
                to.recv_multipart()


def bombs(peer: Peer) -> None:
    """Small bodies that say that they are huge, or are deeply nested."""
    cmd, _out = peer.session()
    head = b"\x85\xa4call\x01\xa7request\xa1b\xa5epoch\xc4\x08" + peer.epoch + b"\xaamax_tokens\x08\xa6prompt"
    bodies = [
        head + b"\xdd\xff\xff\xff\xff",
        head + b"\x91" * 60_000,
        b"\xdf\xff\xff\xff\xff",
        head + b"\xdd\x00\x00\xf0\x00" + b"\x01" * 0xF000,
    ]
    peer.flood(cmd, ([b"ZE1I", body] for body in itertools.cycle(bodies)))


def many_parts(peer: Peer) -> None:
    """Messages of twenty thousand parts."""
    parts = [b"ZE1P"] + [b""] * 20_000
    peer.flood(peer.cmd(), (parts for _ in itertools.count()))


def huge_frames(peer: Peer) -> None:
    """Bodies of 16 MiB."""
    body = bytes(16 << 20)
    peer.flood(peer.cmd(SNDHWM=2), ([b"ZE1I", body] for _ in itertools.count()))


def half_open(peer: Peer) -> None:
    """Connections that never say a word."""
    addresses = itertools.cycle([peer.address, peer.cmd_address, peer.out_address])
    open_now: list[socket.socket] = []
    while peer.goes_on:
        with contextlib.suppress(OSError):
            open_now.append(_raw(next(addresses)))
        if len(open_now) > HALF_OPEN:
            open_now.pop(0).close()


def tokenizers_unread(peer: Peer) -> None:
    """Twenty connections ask for the tokenizer, and none reads it."""
    sockets = [peer.socket(zmq.DEALER, peer.address, RCVHWM=1) for _ in range(20)]
    for ctl in itertools.cycle(sockets):
        if not peer.goes_on:
            return
        peer.send(ctl, peer.message("Z"))


def never_reading(peer: Peer) -> None:
    """Streams with all log-probabilities, and nothing on out is read."""
    cmd = peer.cmd()
    cmd.send_multipart(peer.hello())
    assert cmd.poll(60_000)
    welcome = msgpack.unpackb(cmd.recv_multipart()[1])
    out = peer.socket(zmq.SUB, peer.out_address, RCVHWM=1)
    out.setsockopt_string(zmq.SUBSCRIBE, welcome["topic"])
    time.sleep(0.5)
    never_acknowledging(peer, cmd, max_tokens=1000, logprobs=20, ignore_eos=True)


def never_acknowledging(peer: Peer, cmd: Any = None, **fields: Any) -> None:
    """Requests that end and are never forgotten."""
    out = None
    if cmd is None:
        cmd, out = peer.session()
    for index in itertools.count():
        if not peer.goes_on:
            return
        peer.send(cmd, peer.insert(f"n{index}", **fields))
        time.sleep(0.002)
        while cmd.poll(0):
            cmd.recv_multipart()
        while out is not None and out.poll(0):
            out.recv_multipart()


def constraints(peer: Peer) -> None:
    """Twenty hostile constraints at a time, all of the corpus again and again."""
    cmd, out = peer.session()
    made = [{"kind": kind, "text": text, "choices": choices} for kind, text, choices in HOSTILE.values()]
    running: set[str] = set()
    for index, constraint in enumerate(itertools.cycle(made)):
        name = f"c{index}"
        running.add(name)
        cmd.send_multipart(
            peer.insert(name, max_tokens=200, sampling={"temperature": 1.0}, constraint=constraint)
        )
        while len(running) >= 20 and peer.goes_on:
            if cmd.poll(1):
                kind, body = cmd.recv_multipart()
                if kind == b"ZE1e":
                    running.discard(msgpack.unpackb(body)["request"])
            if out.poll(1):
                _, kind, body = out.recv_multipart()
                ends = [row[0] for row in msgpack.unpackb(body).get("rows", ()) if len(row) > 4 and row[4]]
                running.difference_update(ends)
                if ends:
                    cmd.send_multipart(peer.message("K", requests=ends, epoch=peer.epoch))
        if not peer.goes_on:
            return


def _raw(address: str) -> socket.socket:
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    raw = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET, socket.SOCK_STREAM)
    raw.settimeout(5)
    try:
        raw.connect(place if kind == "ipc" else (host, int(port)))
    except OSError:
        raw.close()
        raise
    return raw


ATTACKS: dict[str, Callable[[Peer], None]] = {
    attack.__name__: attack
    for attack in (
        nothing, subscriptions_many, subscriptions_same, subscriptions_long, not_subscriptions, hellos, inserts, aborts,
        resumes, resumes_unread, pings, malformed, bombs, many_parts, huge_frames, half_open, tokenizers_unread,
        never_reading, never_acknowledging, constraints,
    )
}  # fmt: skip


def main() -> None:
    """Attack until the time is up."""
    name, address, seconds = sys.argv[1:]
    ATTACKS[name](Peer(address, float(seconds)))
    os._exit(0)


if __name__ == "__main__":
    main()
