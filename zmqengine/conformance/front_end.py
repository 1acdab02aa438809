"""A minimal front-end on three sockets, as an author in another language would write it from SPEC.md."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

Body = dict[str, Any]
Reply = tuple[str, Body]

FRAME_REST_MS = 300
"""Silence after which nothing more is expected."""


class NotConforming(Exception):
    """A deviation of the worker from SPEC.md, described in the message."""


class NotApplicable(Exception):
    """A rule about what this worker's model does not do."""


def expect(holds: object, otherwise: str) -> None:
    """Raise NotConforming unless `holds`."""
    if not holds:
        raise NotConforming(otherwise)


class FrontEnd:
    """One front-end of one worker; `close()` at the end.

    `answer_s` is the time-out of a reply. `prepare` is called with every socket before it connects, to set keys.
    """

    def __init__(
        self, ctl: str, *, answer_s: float, prepare: Callable[[zmq.Socket[bytes]], None] | None = None
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._answer_s = answer_s
        self._prepare = prepare
        self._calls = itertools.count(1)
        self._ctl_address = ctl
        self.out: Any = None
        self.secret = os.urandom(32)
        self.welcome: Body = {}
        self.frames: list[tuple[str, Body]] = []
        self.topics: set[bytes] = set()
        try:
            self.ctl = self._connect(zmq.DEALER, ctl)
            self.description = self.wait_ready()
            self.cmd = self._connect(zmq.DEALER, self._seen(self.description["cmd"]))
        except BaseException:
            # A context left to the garbage collector waits there for its sockets, which are garbage too: for ever.
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets without bye."""
        self._context.destroy(linger=0)

    # --- asking ---

    def ask(self, kind: str, _socket: Any = None, /, **body: Any) -> Reply:
        """Send a message and return its reply, on ctl unless another socket is given."""
        return self.ask_raw(_socket or self.ctl, kind, {"call": next(self._calls), **body})

    def command(self, kind: str, **body: Any) -> Reply:
        """Send a command on cmd and return its reply."""
        return self.ask(kind, self.cmd, **body)

    def ask_raw(self, socket: Any, kind: str, body: Body | bytes) -> Reply:
        """Send this body under this type, and return the reply."""
        self.send(socket, kind, body)
        if not socket.poll(int(self._answer_s * 1000)):
            raise NotConforming(f"no answer to {kind!r} within {self._answer_s:g} s")
        reply, answer = _open(socket.recv_multipart())
        call = body.get("call") if isinstance(body, dict) else None
        # A rejection of an unreadable message has no call id.
        calls = (call, 0) if reply == "e" else (call,)
        expect(call is None or answer.get("call", 0) in calls, f"the answer to {kind!r} has another call")
        return reply, answer

    def send(self, socket: Any, kind: str, body: Body | bytes) -> None:
        """Send and wait for nothing."""
        socket.send_multipart(
            [b"ZE1" + kind.encode(), body if isinstance(body, bytes) else msgspec.msgpack.encode(body)]
        )

    def refused(self, reply: Reply, code: str) -> Body:
        """The body of a reply, which must be a rejection with this code."""
        kind, body = reply
        received = f"{kind!r} {body.get('code', '')}".strip()
        expect(kind == "e" and body.get("code") == code, f"expected 'e' {code}, got {received}")
        expect(isinstance(body.get("message"), str) and body["message"], f"{code} comes without a message")
        return body

    def done(self, reply: Reply, kind: str = "o") -> Body:
        """The body of a reply, which must be of this type."""
        received = f"{reply[0]!r} {reply[1].get('code', '')} {reply[1].get('message', '')}".strip()
        expect(reply[0] == kind, f"expected {kind!r}, got {received}")
        return reply[1]

    # --- sessions ---

    def wait_ready(self) -> Body:
        """The description of the worker, once it is ready."""
        until_s = time.monotonic() + self._answer_s
        while True:
            description = self.done(self.ask("D"), "d")
            if description.get("state") == "ready":
                return description
            expect(time.monotonic() < until_s, f"the worker is not ready but {description.get('state')!r}")
            time.sleep(0.05)

    def hello(self, **other: Any) -> Reply:
        """Say hello with this front-end's secret."""
        return self.command(
            "H", **{"protocol": [1, 1], "client": "conformance", "session_secret": self.secret} | other
        )

    def open_session(self) -> FrontEnd:
        """Hello, subscribe, and wait for the grant."""
        self.welcome = self.done(self.hello(), "h")
        self.subscribe(self.welcome["topic"])
        kind, granted = self.next_frame()
        expect(kind == "g", f"the first frame on out is not 'g' but {kind!r}")
        expect(granted.get("session") == self.welcome["session"], "another session is granted")
        expect(granted.get("epoch") == self.welcome["epoch"], "granted has another epoch than welcome")
        return self

    def subscribe(self, topic: str) -> None:
        """Subscribe to a topic on out, in a connection of its own."""
        self.out = self._context.socket(zmq.SUB)
        self.out.linger = 0
        self.out.subscribe(topic)
        if self._prepare is not None:
            self._prepare(self.out)
        self.out.connect(self._seen(self.description["out"]))

    # --- requests ---

    def insert(self, request: str, prompt: list[int] | None = None, **fields: Any) -> Reply:
        """Insert a request; prompt and max_tokens have defaults. Raises NotApplicable where the model generates
        nothing."""
        if not self.description["model"].get("generates", True):
            raise NotApplicable
        body = {
            "epoch": self.welcome["epoch"],
            "prompt": prompt or [5, 6, 7],
            "max_tokens": 8,
            "ignore_eos": True,
        }
        return self.command("I", request=request, **(body | fields))

    def accepted(self, request: str, prompt: list[int] | None = None, **fields: Any) -> Body:
        """Insert a request that has to be accepted."""
        return self.done(self.insert(request, prompt, **fields), "i")

    def next_frame(self) -> tuple[str, Body]:
        if not self.out.poll(int(self._answer_s * 1000)):
            raise NotConforming(f"nothing came on out within {self._answer_s:g} s")
        topic, *rest = self.out.recv_multipart()
        self.topics.add(topic)
        self.frames.append(_open(rest))
        return self.frames[-1]

    def rows(self, request: str, *, start: int = 0) -> Iterator[list[Any]]:
        """Token rows of a request, checked to follow one another, as far as its end."""
        index = start
        while True:
            kind, frame = self.next_frame()
            for row in frame.get("rows", ()) if kind == "t" else ():
                if row[0] != request:
                    continue
                expect(row[1] == index, f"expected index {index} of {request}, got {row[1]}")
                index += len(row[2])
                yield row
                if len(row) > 4 and row[4] is not None:
                    return

    def read(self, request: str, *, start: int = 0) -> tuple[list[int], Body]:
        """Its tokens from `start` on, and its end."""
        tokens: list[int] = []
        end: Body = {}
        for row in self.rows(request, start=start):
            tokens += row[2]
            if len(row) > 4 and row[4] is not None:
                end = row[4]
        return tokens, end

    def generate(
        self, request: str, prompt: list[int] | None = None, **fields: Any
    ) -> tuple[list[int], Body]:
        """Insert a request that has to be accepted, and read it to its end."""
        self.accepted(request, prompt, **fields)
        return self.read(request, start=len(fields.get("emitted", ())))

    def is_quiet(self) -> bool:
        """Whether nothing arrives on out for a moment, token frames of ended requests included."""
        return not self.out.poll(FRAME_REST_MS)

    # --- parts ---

    def _connect(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        if self._prepare is not None:
            self._prepare(socket)
        socket.connect(address)
        return socket

    def _seen(self, described: str) -> str:
        """An address from describe for this front-end: `*` is the host of its ctl address."""
        if not described.startswith("tcp://"):
            return described
        host, _, port = described.removeprefix("tcp://").rpartition(":")
        if host not in ("*", "0.0.0.0", "[::]"):
            return described
        return f"tcp://{self._ctl_address.removeprefix('tcp://').rpartition(':')[0]}:{port}"


def _open(frames: list[bytes]) -> tuple[str, Body]:
    expect(len(frames) == 2, f"a message has {len(frames)} frames instead of 2 (3 on out)")
    header, body = frames
    expect(len(header) == 4 and header[:3] == b"ZE1", f"the header is {header!r}")
    try:
        opened = msgspec.msgpack.decode(body, strict=False)
    except msgspec.DecodeError as error:
        raise NotConforming(f"the body of {header!r} is no msgpack: {error}") from error
    expect(isinstance(opened, dict), f"the body of {header!r} is no map")
    return header[3:].decode("latin-1"), opened
