"""The sockets of one client, shared by both halves: carries out actions, passes messages to the session core."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

import zmq

from zmqengine.tcp_probes import probe
from zmqengine_client.core.outbox import (
    Action,
    Channel,
    CloseWorkerSockets,
    OpenCommands,
    OpenControl,
    OpenOutput,
    Send,
)
from zmqengine_client.core.session import ClientSession
from zmqengine_client.keys import CurveKeys

log = logging.getLogger("zmqengine.client")

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
LINGER_MS = 100
PROBES_MAX = 5
"""Probes without an answer after which a connection to a worker whose machine vanished is closed."""
RECONNECT_MS = 50
RECONNECT_NEAR_MAX_MS = 250
RECONNECT_FAR_MAX_MS = 1_000
CONTROL_QUEUE_MAX = 8
"""High-water mark of ctl without a worker: low, or a new worker gets all describes of the last minute."""
ROUND_MESSAGES_MAX = 256

_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("=hi")
# Plain ints: "&" and "|" of an enumeration take longer than the call itself.
_POLLIN = int(zmq.POLLIN)
_DONTWAIT = int(zmq.DONTWAIT)
_DONTWAIT_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class Transport:
    """ctl, cmd and out, and a monitor of the first two. Used from one thread at a time.

    `watch` and `unwatch` are called for every socket that the half has to poll; it calls `signalled` for those that its
    poll returns, and then `receive`. With `launcher` the address is that of a launcher, and ctl is opened when it has
    sent the worker's.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None,
        *,
        watch: Callable[[zmq.Socket[bytes]], None],
        unwatch: Callable[[zmq.Socket[bytes]], None],
        launcher: bool = False,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys
        self._watch = watch
        self._unwatch = unwatch
        self._sockets: dict[Channel, zmq.Socket[bytes]] = {}
        self._monitors: dict[Channel, zmq.Socket[bytes]] = {}
        # Sockets that may have messages: to ask each one takes as long as to read a message.
        self._signalled: set[zmq.Socket[bytes]] = set()
        self._address = address
        if launcher:
            self._open("launcher", zmq.DEALER, address)
        else:
            self._open("ctl", zmq.DEALER, address, monitored=True)

    def perform(self, actions: list[Action]) -> None:
        """Carry out actions of the core, in order."""
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, OpenControl):
                self._address = action.address or self._address
                self._open("ctl", zmq.DEALER, self._address, monitored=True)
            elif isinstance(action, OpenCommands):
                self._open("cmd", zmq.DEALER, action.address, monitored=True)
            elif isinstance(action, OpenOutput):
                self._open("out", zmq.SUB, action.address, topic=action.topic)
            elif isinstance(action, CloseWorkerSockets):
                self._close("cmd")
                self._close("out")

    def signalled(self, source: zmq.Socket[bytes]) -> None:
        """Note that a socket given to `watch` may have messages."""
        self._signalled.add(source)

    def receive(self, session: ClientSession, now: float) -> bool:
        """Pass received messages to the core; returns whether there may be more."""
        signalled, self._signalled = self._signalled, set()
        monitors = [(channel, monitor) for channel, monitor in self._monitors.items() if monitor in signalled]
        # Replies before output before a disconnect: nothing that arrived is thrown away.
        channels: tuple[Channel, ...] = ("ctl", "cmd", "out", "launcher")
        for channel in channels:
            socket = self._sockets.get(channel)
            if socket is not None and (monitors or socket in signalled):
                self._receive_from(socket, channel, session, now)
        for channel, monitor in monitors:
            self._receive_events(monitor, channel, session, now)
        return bool(self._signalled)

    def close(self) -> None:
        """Close everything. Waits at most `LINGER_MS` for unsent messages. Idempotent."""
        for channel in list(self._sockets):
            self._close(channel)
        self._context.term()

    def _receive_from(
        self, socket: zmq.Socket[bytes], channel: Channel, session: ClientSession, now: float
    ) -> None:
        for _ in range(ROUND_MESSAGES_MAX):
            if not _is_readable(socket):
                return
            session.receive(channel, socket.recv_multipart(zmq.DONTWAIT), now)
        self._signalled.add(socket)

    def _receive_events(
        self, monitor: zmq.Socket[bytes], channel: Channel, session: ClientSession, now: float
    ) -> None:
        for _ in range(ROUND_MESSAGES_MAX):
            if not _is_readable(monitor):
                return
            event, value = _EVENT.unpack(monitor.recv_multipart(zmq.DONTWAIT)[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                session.connected(channel)
            elif event == zmq.EVENT_DISCONNECTED:
                session.disconnected(channel, now)
            else:
                session.handshake_failed(refused=event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == 400)
        self._signalled.add(monitor)

    def _send(self, action: Send) -> None:
        socket = self._sockets.get(action.channel)
        if socket is None:
            return
        # To send takes the signal of a message that has arrived.
        self._signalled.add(socket)
        try:
            header, body = action.frames
            socket.send(header, _DONTWAIT_MORE)
            socket.send(body, _DONTWAIT, copy=isinstance(body, bytes))
        except zmq.Again:
            # The core sends it again if it gets no answer.
            log.debug("%s is full", action.channel)

    def _open(
        self,
        channel: Channel,
        kind: int,
        address: str,
        *,
        topic: bytes | None = None,
        monitored: bool = False,
    ) -> None:
        self._close(channel)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets[channel] = socket
        self._configure(socket, address)
        if channel == "ctl":
            socket.setsockopt(zmq.SNDHWM, CONTROL_QUEUE_MAX)
        if topic is not None:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        if monitored:
            monitor = socket.get_monitor_socket(_MONITORED)
            self._monitors[channel] = monitor
            self._watch(monitor)
            self._signalled.add(monitor)
        socket.connect(address)
        self._watch(socket)
        # Messages that arrived before the watch began are not signalled any more.
        self._signalled.add(socket)

    def _configure(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        is_far = address.startswith("tcp://")
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_FAR_MAX_MS if is_far else RECONNECT_NEAR_MAX_MS)
        if is_far:
            socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
            probe(socket, PROBES_MAX)
        if self._keys is not None:
            self._keys.apply(socket)

    def _close(self, channel: Channel) -> None:
        socket = self._sockets.pop(channel, None)
        if socket is None:
            return
        self._unwatch(socket)
        self._signalled.discard(socket)
        monitor: Any = self._monitors.pop(channel, None)
        if monitor is not None:
            self._unwatch(monitor)
            self._signalled.discard(monitor)
            socket.disable_monitor()
            monitor.close(0)
        socket.close()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    # Cheaper than a failing recv: most sockets have nothing to read most of the time.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
