"""Binds the worker's three sockets."""

from __future__ import annotations

import errno
import os
from typing import Any

import zmq

from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import Endpoints, ipc_path, tcp_host_port
from zmqengine.tcp_probes import probe
from zmqengine.worker.wire.auth import Guard
from zmqengine.worker.wire.socket_files import SocketFiles

PROBES_MAX = 3
"""Probes without an answer after which the tcp connection of a vanished front-end is closed."""
OUT_FRAMES_MAX = 1_000
"""Frames queued in libzmq for one slow reader before it counts as lagging."""
HANDSHAKE_MS = 10_000
"""Maximum milliseconds of the handshake of a connection."""
CONTROL_BYTES_MAX = 4 * 65_536
"""Maximum bytes of a request on ctl."""
CONTROL_REPLIES_MAX = 64
"""Replies queued in libzmq for one connection that does not read."""
COMMANDS_WAITING_MAX = 128
"""Commands queued in libzmq for one connection before it feels backpressure."""
SUBSCRIPTION_BYTES_MAX = 512
"""Maximum bytes of a frame on out. A topic has 35 bytes, the longest part of a CURVE handshake 290; libzmq's index
takes 100 bytes for a topic."""
SUBSCRIPTIONS_WAITING_MAX = 4
"""Commands queued in libzmq for each connection. libzmq reads all of them at once: with many, a flood would not let it
return."""


def new_context() -> zmq.Context[Any]:
    """A context whose I/O thread does not push the actor off its core.

    On Linux a woken thread may preempt the thread that woke it: with all cores busy, publishing to four front-ends took
    0.9 ms of a pass, and 0.1 ms with the batch policy, at no cost in tokens a second.
    """
    context: zmq.Context[Any] = zmq.Context()
    if hasattr(os, "SCHED_BATCH"):
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


class Sockets:
    """ctl, cmd and out of one worker. `endpoints` are the real addresses, with the ports the system chose.

    Raises `ConfigError` when an address is in use or cannot be bound. With a `guard`, only peers with a known key can
    connect. The context and the guard are closed with the sockets.
    """

    def __init__(
        self,
        wanted: Endpoints,
        *,
        frame_bytes_max: int,
        context: zmq.Context[Any] | None = None,
        guard: Guard | None = None,
        backlog: int = 1024,
    ) -> None:
        self._files = SocketFiles(ipc_path(wanted.ctl).parent) if wanted.is_ipc else None
        self.context = context or new_context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._guard = guard
        self._backlog = backlog
        self.monitors: list[zmq.Socket[bytes]] = []
        """One monitor for each socket, for the connection limiter."""
        try:
            self.ctl, ctl = self._bind(
                zmq.ROUTER, wanted.ctl, {zmq.MAXMSGSIZE: CONTROL_BYTES_MAX, zmq.SNDHWM: CONTROL_REPLIES_MAX}
            )
            self.cmd, cmd = self._bind(
                zmq.ROUTER,
                wanted.cmd,
                {zmq.MAXMSGSIZE: 4 * frame_bytes_max, zmq.RCVHWM: COMMANDS_WAITING_MAX},
            )
            self.out, out = self._bind(
                zmq.XPUB,
                wanted.out,
                {
                    zmq.MAXMSGSIZE: SUBSCRIPTION_BYTES_MAX,
                    zmq.RCVHWM: SUBSCRIPTIONS_WAITING_MAX,
                    zmq.SNDHWM: OUT_FRAMES_MAX,
                },
            )
        except BaseException:
            self.close(linger_ms=0)
            raise
        self.endpoints = Endpoints(ctl, cmd, out)
        self.files = [ipc_path(address) for address in (ctl, cmd, out)] if wanted.is_ipc else []

    def close(self, *, linger_ms: int) -> None:
        """Close the sockets, wait up to `linger_ms` for unsent frames, and remove socket files. Idempotent.

        With 0, libzmq 4.3.5 may end the process if frames wait and a reader disconnects in that moment, as it drops
        them in the middle of a message (an assertion in src/session_base.cpp, line 233).
        """
        for socket in self._sockets:
            socket.disable_monitor()
            socket.close(linger_ms)
        for monitor in self.monitors:
            monitor.close(0)
        self._sockets.clear()
        self.monitors.clear()
        if self._guard is not None:
            self._guard.close()
        self.context.term()
        if self._files is not None:
            self._files.release()
            self._files = None

    def keep_ctl(self) -> None:
        """Restore the file of ctl if it was removed; for the thread that uses ctl."""
        if self._files is not None:
            self._files.keep(self.ctl, self.files[0])

    def keep_cmd_and_out(self) -> None:
        """Restore the files of cmd and out if they were removed; for the thread that uses them."""
        if self._files is not None:
            self._files.keep(self.cmd, self.files[1])
            self._files.keep(self.out, self.files[2])

    def touch(self) -> None:
        """Update the file times, so that cleaners of /tmp leave the files alone; called every few hours."""
        if self._files is not None:
            self._files.touch()

    def _bind(self, kind: int, address: str, options: dict[int, int]) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.BACKLOG, self._backlog)
        # A peer that connects and sends nothing should not hold a descriptor for long.
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if kind == zmq.XPUB:
            _grant_by_hand(socket)
        else:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if address.startswith("tcp://"):
            socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
            probe(socket, PROBES_MAX)
        if self._guard is not None:
            self._guard.secure(socket)
        self._monitor(socket)
        try:
            # A socket file must never exist with wider rights, not even for a moment.
            earlier_umask = os.umask(0o177)
            try:
                socket.bind(address)
            finally:
                os.umask(earlier_umask)
        except zmq.ZMQError as error:
            raise ConfigError(_bind_error(address, error)) from None
        return socket, _real_address(socket, address)

    def _monitor(self, socket: zmq.Socket[bytes]) -> None:
        address = f"inproc://connections-{len(self.monitors)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self.context.socket(zmq.PAIR)
        # No high-water mark, or libzmq's I/O thread would wait for the reader.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        self.monitors.append(monitor)


def _grant_by_hand(socket: zmq.Socket[bytes]) -> None:
    """Set an XPUB to manual grants, a report of every subscription, and EAGAIN instead of drops."""
    socket.setsockopt(zmq.XPUB_MANUAL, 1)
    socket.setsockopt(zmq.XPUB_NODROP, 1)


def _real_address(socket: zmq.Socket[bytes], wanted: str) -> str:
    if not wanted.startswith("tcp://"):
        return wanted
    host, _ = tcp_host_port(wanted)
    real: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return f"tcp://{host}:{real.rstrip(bytes(1)).decode().rsplit(':', 1)[1]}"


def _bind_error(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use; choose another port, or 0 for any free one"
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"{address}: this machine has no such address"
    return f"cannot bind {address}: {error.strerror}"
