"""Sockets of the client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import zmq

from tests.support.workers import START_S
from zmqengine_client.core.outbox import OpenCommands, Send
from zmqengine_client.core.session import ClientSession
from zmqengine_client.transport import Transport


def test_a_far_worker_is_probed_by_the_system_and_not_by_libzmq() -> None:
    """A heartbeat on a connection that was lost while frames wait would end the program."""
    opened: list[zmq.Socket[bytes]] = []
    transport = Transport("tcp://127.0.0.1:9", None, watch=opened.append, unwatch=opened.remove)
    try:
        assert opened
        for ours in opened:
            if ours.getsockopt(zmq.TYPE) == zmq.DEALER:
                assert ours.getsockopt(zmq.HEARTBEAT_IVL) == 0
                assert ours.getsockopt(zmq.TCP_KEEPALIVE) == 1
                assert ours.getsockopt(zmq.TCP_MAXRT) == 30_000
    finally:
        transport.close()


class Received:
    """A session that keeps what it receives."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, list[bytes]]] = []

    def receive(self, channel: str, frames: list[bytes], now: float) -> None:
        self.messages.append((channel, frames))

    def connected(self, channel: str) -> None: ...


def test_a_reply_is_read_after_a_send_without_another_signal(tmp_path: Path) -> None:
    """To send takes the signal of a reply that has come: no poll returns the socket for it any more."""
    address = f"ipc://{tmp_path}/cmd"
    received = Received()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.linger = 0
        worker.bind(address)
        transport = Transport(
            f"ipc://{tmp_path}/ctl", None, watch=lambda source: None, unwatch=lambda source: None
        )
        try:
            transport.perform([OpenCommands(address), Send("cmd", (b"h", b"first"))])
            assert worker.poll(int(START_S * 1000))
            route, *_ = worker.recv_multipart()
            transport.receive(cast("ClientSession", received), 0.0)
            worker.send_multipart([route, b"h", b"reply"])
            until_s = time.monotonic() + START_S
            while not received.messages and time.monotonic() < until_s:
                transport.perform([Send("cmd", (b"h", b"again"))])
                transport.receive(cast("ClientSession", received), 0.0)
        finally:
            transport.close()
    assert received.messages == [("cmd", [b"h", b"reply"])]
