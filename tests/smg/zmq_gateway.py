"""The gateway's side of the direct ZeroMQ wire, as the real one behaves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from zmqengine_smg.zmq_link import handshake_address

WAIT_MS = 30_000
NAMES = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "",
    "",
    "finish_reason",
    "stop_reason",
    "",
    "",
    "",
    "",
    "stats",
)


class ZmqGateway:
    """Binds what a gateway binds for ipc://`path` and does the handshake with whoever comes."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self.handshake = self._bind(zmq.ROUTER, handshake_address(str(path)))
        self.addresses = (f"ipc://{path}-in.sock", f"ipc://{path}-out.sock")
        self._input = self._bind(zmq.ROUTER, self.addresses[0])
        self._output = self._bind(zmq.PULL, self.addresses[1])
        self.engine = b""
        self.registration: dict[str, Any] = {}
        self.loads: list[dict[str, Any]] = []
        self.utility: Any = None

    def shake_hands(self) -> None:
        """HELLO, INIT, READY and the registration."""
        self.engine, hello = self._receive(self.handshake)
        assert msgspec.msgpack.decode(hello)["status"] == "HELLO"
        init = {
            "addresses": {
                "inputs": [self.addresses[0]], "outputs": [self.addresses[1]],
                "coordinator_input": None, "coordinator_output": None, "frontend_stats_publish_address": None,
            },
            "parallel_config": {},
        }  # fmt: skip
        self.handshake.send_multipart([self.engine, msgspec.msgpack.encode(init)])
        _, ready = self._receive(self.handshake)
        assert msgspec.msgpack.decode(ready)["status"] == "READY"
        _, registration = self._receive(self._input)
        self.registration = msgspec.msgpack.decode(registration)

    def send(self, kind: bytes, body: object) -> None:
        """One message to the engine."""
        self._input.send_multipart([self.engine, kind, msgspec.msgpack.encode(body)])

    def add(
        self, request_id: str, prompt: list[int], *, fields: dict[int, Any] | None = None, **sampling: Any
    ) -> None:
        """A request as the gateway 1.13 sends it, 21 places long; `fields` are set by their place."""
        parameters = {
            "temperature": 0.0,
            "max_tokens": 5,
            "seed": 0,
            "stop_token_ids": [0],
            "_eos_token_id": 0,
        }
        request: list[Any] = [
            request_id, prompt, None, parameters | sampling, None, time.time(), None, None, None, None, None,
            0, 0, 0, None, False, None, None, None, False, None,
        ]  # fmt: skip
        for place, value in (fields or {}).items():
            request[place] = value
        self.send(b"\x00", request)

    def receive(self) -> list[dict[str, Any]] | None:
        """The outputs of the next message; None for the engine's last word."""
        (frame,) = self._receive(self._output)
        if frame == b"ENGINE_CORE_DEAD":
            return None
        engine, outputs, stats, _, utility, *_ = msgspec.msgpack.decode(frame)
        assert engine == 0
        if stats is not None:
            self.loads.append(stats)
        if utility is not None:
            self.utility = utility
        return [dict(zip(NAMES, output, strict=True)) for output in outputs]

    def has_output(self) -> bool:
        """Whether the engine has said something that is not received yet."""
        return bool(self._output.poll(100))

    def read(self, *request_ids: str) -> dict[str, list[dict[str, Any]]]:
        """The outputs of these requests up to the end of each."""
        found: dict[str, list[dict[str, Any]]] = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            outputs = self.receive()
            assert outputs is not None, "the engine says that it is dead"
            for output in outputs:
                found[output["request_id"]].append(output)
                if output["finish_reason"] is not None:
                    open_ids.discard(output["request_id"])
        return found

    def close(self) -> None:
        """Go away, as a gateway that is killed."""
        self._context.destroy(linger=0)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if kind == zmq.ROUTER:
            # An engine that comes back is let in, even if its former connection was not seen to end yet.
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(address)
        return socket

    def _receive(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        assert socket.poll(WAIT_MS), "the engine says nothing"
        return socket.recv_multipart()


def tokens_of(outputs: list[dict[str, Any]]) -> list[int]:
    """All tokens of one request."""
    return [token for output in outputs for token in output["new_token_ids"]]


@contextlib.contextmanager
def engine_path() -> Iterator[Path]:
    """A path for a worker URL ipc://PATH of which the handshake's port is free."""
    with tempfile.TemporaryDirectory(prefix="zmqe-", dir="/tmp") as directory:
        for number in range(100):
            path = Path(directory) / f"e{number}"
            with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
                try:
                    probe.bind(handshake_address(str(path)))
                except zmq.ZMQError:
                    continue
            yield path
            return
    raise AssertionError("no free port")
