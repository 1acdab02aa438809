"""A front-end made of pyzmq and msgpack alone, from SPEC.md: what an author in another language would write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from tests.support.workers import WorkerProcess

ANSWER_MS_MAX = 60_000


class PlainFrontEnd:
    """Three sockets and a map or two."""

    def __init__(self, ctl: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.ctl = self._connect(zmq.DEALER, ctl)
        self.description = self._wait_ready()
        self.cmd = self._connect(zmq.DEALER, self.description["cmd"])
        self.calls = 1

    def _wait_ready(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + ANSWER_MS_MAX / 1000
        while time.monotonic() < deadline_s:
            description = self.ask(self.ctl, b"D", {"call": 1})[1]
            if description["state"] == "ready":
                return description
            # The dialogue polls; between two questions there is nothing to wait on.
            self.ctl.poll(50)
        raise AssertionError("the worker did not become ready")

    def _connect(self, kind: int, address: str) -> Any:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.connect(address)
        return socket

    def ask(self, socket: Any, kind: bytes, body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        socket.send_multipart([b"ZE1" + kind, msgpack.packb(body)])
        assert socket.poll(ANSWER_MS_MAX), f"no answer to {kind!r}"
        header, reply = socket.recv_multipart()
        assert header[:3] == b"ZE1"
        return header[3:], msgpack.unpackb(reply, strict_map_key=False)

    def command(self, kind: bytes, **body: Any) -> tuple[bytes, dict[str, Any]]:
        self.calls += 1
        return self.ask(self.cmd, kind, {"call": self.calls, **body})

    def open_session(self) -> dict[str, Any]:
        kind, welcome = self.command(b"H", protocol=[1, 1], client="plain", session_secret=os.urandom(32))
        assert kind == b"h"
        self.out = self.context.socket(zmq.SUB)
        self.out.linger = 0
        self.out.subscribe(welcome["topic"])
        self.out.connect(self.description["out"])
        kind, granted = self.output()
        assert kind == b"g"
        assert granted["epoch"] == welcome["epoch"]
        return welcome

    def output(self) -> tuple[bytes, dict[str, Any]]:
        assert self.out.poll(ANSWER_MS_MAX), "nothing on out"
        _, header, body = self.out.recv_multipart()
        return header[3:], msgpack.unpackb(body, strict_map_key=False)

    def read_to_end(self, request: str) -> tuple[list[int], dict[str, Any]]:
        tokens: list[int] = []
        while True:
            kind, frame = self.output()
            if kind != b"t":
                continue
            for row in frame["rows"]:
                if row[0] != request:
                    continue
                assert row[1] == len(tokens)
                tokens += row[2]
                if len(row) > 4 and row[4] is not None:
                    return tokens, row[4]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A real worker on pico."""
    with WorkerProcess(None) as running:
        yield running


@pytest.fixture
def front_end(worker: WorkerProcess) -> Iterator[PlainFrontEnd]:
    """Connected, no session yet."""
    plain = PlainFrontEnd(worker.address)
    yield plain
    plain.context.destroy(linger=0)


def test_the_dialogue_of_the_specification_works_as_written(front_end: PlainFrontEnd) -> None:
    """describe, hello, subscribe, granted, insert, tokens, end, ack, bye."""
    assert front_end.description["state"] == "ready"
    welcome = front_end.open_session()
    kind, accepted = front_end.command(
        b"I", request="r", epoch=welcome["epoch"], prompt=[5, 6, 7], max_tokens=12, ignore_eos=True
    )
    assert kind == b"i"
    assert accepted["next_index"] == 0
    tokens, end = front_end.read_to_end("r")
    assert len(tokens) == 12
    assert end["finish"] == "length"
    assert end["prompt_tokens"] == 3
    kind, replay = front_end.command(b"U", request="r", epoch=welcome["epoch"], from_index=5)
    assert kind == b"u"
    assert replay["row"][2] == tokens[5:]
    assert front_end.command(b"K", requests=["r"])[0] == b"o"
    kind, gone = front_end.command(b"U", request="r", epoch=welcome["epoch"], from_index=0)
    assert (kind, gone["code"]) == (b"e", "unknown_request")
    assert front_end.command(b"B")[0] == b"o"


def test_a_seed_that_the_worker_chose_is_told_and_gives_the_same_output_again(
    front_end: PlainFrontEnd,
) -> None:
    """No seed given: `accepted` has one, and it alone reproduces the sampled output."""
    welcome = front_end.open_session()
    common = {"epoch": welcome["epoch"], "prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
    sampling = {"temperature": 1.0, "top_p": 0.95}
    _, first = front_end.command(b"I", request="a", sampling=sampling, **common)
    tokens, _ = front_end.read_to_end("a")
    front_end.command(b"I", request="b", sampling=sampling, seed=first["seed"], **common)
    again, _ = front_end.read_to_end("b")
    assert again == tokens
    front_end.command(b"I", request="c", sampling=sampling, seed=first["seed"] ^ 1, **common)
    other, _ = front_end.read_to_end("c")
    assert other != tokens


def test_the_other_control_messages_answer(front_end: PlainFrontEnd) -> None:
    """ping, status, metrics and tokenizer; an unknown key in them is ignored."""
    assert front_end.ask(front_end.ctl, b"P", {"call": 7, "future": [1, 2]})[1]["call"] == 7
    kind, status = front_end.ask(front_end.ctl, b"S", {"call": 8})
    assert kind == b"s"
    assert status["numbers"]["prompt_cache_bytes_max"] > 0
    assert "blas" in status["facts"]
    kind, metrics = front_end.ask(front_end.ctl, b"M", {"call": 9})
    assert "zmqengine_passes" in metrics["text"]
    kind, bundle = front_end.ask(front_end.ctl, b"Z", {"call": 10})
    assert kind == b"z"
    assert bundle["tokenizer_json"].startswith(b"{")
    assert bundle["chat_template"]
