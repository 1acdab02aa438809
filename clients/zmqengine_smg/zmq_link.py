"""The sockets to a gateway: the handshake that opens them, and the detection of their loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from zmqengine_client.errors import ZmqEngineError
from zmqengine_smg.zmq_messages import DEAD, Addresses, Handshake, Init, Outputs, Registration

log = logging.getLogger("zmqengine.smg")

IDENTITY = (0).to_bytes(2, "little")
"""The engine's index as its ZeroMQ identity: there is one engine per path."""
STEP_S = 5.0
PORT_FIRST, PORTS = 20_000, 10_000
_FNV_OFFSET, _FNV_PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


class HandshakeFailed(ZmqEngineError):
    """The gateway disconnected or did not answer before the connection was made; dial again."""


def handshake_address(path: str) -> str:
    """The address at which the gateway of worker URL ipc://`path` waits for the engine; its port is FNV-1a of the path.

    Source: the gateway's crates/engine_zmq_client.
    """
    value = _FNV_OFFSET
    for byte in path.encode():
        value = ((value ^ byte) * _FNV_PRIME) & _WORD
    return f"tcp://127.0.0.1:{PORT_FIRST + value % PORTS}"


class EngineLink:
    """An open connection. `gone` is set when the gateway disconnects; a new gateway needs a new link."""

    def __init__(self, requests: zmq.asyncio.Socket, outputs: zmq.asyncio.Socket, gone: _Loss) -> None:
        self._requests = requests
        self._outputs = outputs
        self._loss = gone
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def gone(self) -> asyncio.Event:
        """Set once the gateway has closed the connection."""
        return self._loss.seen

    async def receive(self) -> list[bytes]:
        """The frames of the gateway's next message: kind, body, tensors."""
        return await self._requests.recv_multipart()

    async def send(self, outputs: Outputs) -> None:
        """Send outputs to the gateway. Waits while its queue is full (backpressure)."""
        await self._outputs.send(self._encoder.encode(outputs))

    def send_dead(self) -> None:
        """Tell the gateway that this engine is lost; it then waits for the next handshake."""
        with contextlib.suppress(zmq.Again):
            self._outputs.send(DEAD, zmq.DONTWAIT)

    def close(self) -> None:
        """Close the sockets; queued outputs may still be sent."""
        self._loss.close()
        self._requests.close(linger=0)
        self._outputs.close(linger=1000)


async def dial(
    context: zmq.asyncio.Context, path: str, registration: Callable[[], Registration]
) -> EngineLink:
    """Wait for the gateway without a time limit, and connect to it. Raises `HandshakeFailed`."""
    addresses = await _shake_hands(context, handshake_address(path))
    requests = _socket(context, zmq.DEALER, comes_back=False)
    loss = _Loss(requests)
    outputs = _socket(context, zmq.PUSH, comes_back=False)
    link = EngineLink(requests, outputs, loss)
    try:
        requests.connect(addresses.inputs[0])
        outputs.connect(addresses.outputs[0])
        await requests.send(msgspec.msgpack.encode(registration()))
    except BaseException:
        link.close()
        raise
    return link


async def _shake_hands(context: zmq.asyncio.Context, address: str) -> Addresses:
    socket = _socket(context, zmq.DEALER, comes_back=True)
    loss = _Loss(socket)
    try:
        socket.connect(address)
        await socket.send(msgspec.msgpack.encode(Handshake("HELLO")))
        body = await _unless_lost(socket.recv(), loss)
        try:
            init = msgspec.msgpack.decode(body, type=Init)
        except msgspec.MsgspecError as error:
            raise HandshakeFailed(f"the gateway's answer cannot be read: {error}") from None
        if not init.addresses.inputs or not init.addresses.outputs:
            raise HandshakeFailed("the gateway gave no addresses")
        await socket.send(msgspec.msgpack.encode(Handshake("READY")))
        return init.addresses
    finally:
        loss.close()
        socket.close(linger=1000)


class _Loss:
    """Monitors a socket's connection: sets `connected` when it comes up, `seen` when it breaks."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.connected = asyncio.Event()
        self.seen = asyncio.Event()
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop monitoring; call before the socket is closed."""
        self._task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.seen.set()
            else:
                self.connected.set()


async def _unless_lost(answer: Awaitable[bytes], loss: _Loss) -> bytes:
    """The gateway's answer: no time limit until it connects, `STEP_S` after that."""
    waiting = asyncio.ensure_future(answer)
    lost = asyncio.create_task(loss.seen.wait())
    overdue = asyncio.create_task(_after(loss.connected, STEP_S))
    try:
        await asyncio.wait((waiting, lost, overdue), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise HandshakeFailed("the gateway went away" if lost.done() else "the gateway does not answer")
    finally:
        for task in (waiting, lost, overdue):
            task.cancel()


async def _after(event: asyncio.Event, seconds: float) -> None:
    await event.wait()
    await asyncio.sleep(seconds)


def _socket(context: zmq.asyncio.Context, kind: int, *, comes_back: bool) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # A link never reconnects: the next gateway listens at the same addresses, and must not get the last one's
    # outputs.
    socket.setsockopt(zmq.RECONNECT_IVL, 100 if comes_back else -1)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.IDENTITY, IDENTITY)
    return socket
