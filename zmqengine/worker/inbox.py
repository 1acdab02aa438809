"""Everything that front-ends send the actor: subscriptions on out, commands on cmd."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.codec import command_decoder, encode, read_addressee
from zmqengine.protocol.messages import Command
from zmqengine.worker.commands import CommandHandler
from zmqengine.worker.counters import Counters
from zmqengine.worker.publisher import Publisher
from zmqengine.worker.sessions import SessionTable

log = logging.getLogger("zmqengine.worker")

# A plain number: an enumeration's own "&" takes longer than the look at the socket.
_POLLIN = int(zmq.POLLIN)
COMMANDS_SECONDS_MAX = 0.05
"""After this long a pass leaves further commands to the next one: the batch must not wait for a flood."""


class Inbox:
    """Reads both sockets until they are empty. `with_users` when connections have keys, which then own sessions."""

    def __init__(
        self,
        cmd: zmq.Socket[bytes],
        out: zmq.Socket[bytes],
        commands: CommandHandler,
        sessions: SessionTable,
        publisher: Publisher,
        counters: Counters,
        *,
        frame_bytes_max: int,
        with_users: bool,
        clock: Callable[[], float],
    ) -> None:
        self._cmd = cmd
        self._out = out
        self._commands = commands
        self._sessions = sessions
        self._publisher = publisher
        self._counters = counters
        self._decoder = command_decoder(frame_bytes_max)
        self._with_users = with_users
        self._clock = clock

    def read_subscriptions(self, now_s: float) -> int:
        """Grant what belongs to a session, note who went; returns how many were granted."""
        grants = 0
        while _is_readable(self._out):
            event, user = _bytes_and_user(self._out.recv(zmq.DONTWAIT, copy=not self._with_users))
            if event[:1] == b"\x01":
                grants += self._grant(event[1:], user)
            elif event[:1] == b"\x00":
                self._sessions.unsubscribed(event[1:], now_s)
        return grants

    def read_commands(self, now_s: float) -> int:
        """Carry out and answer all commands that are there; returns how many."""
        handled = 0
        while _is_readable(self._cmd):
            handled += 1
            self._counters.commands += 1
            self._handle(self._cmd.recv_multipart(zmq.DONTWAIT, copy=not self._with_users), now_s)
            if handled % 64 == 0 and self._clock() - now_s > COMMANDS_SECONDS_MAX:
                break
        return handled

    def _grant(self, topic: bytes, user: str) -> bool:
        session = self._sessions.subscribed(topic, user)
        if session is None:
            self._counters.refused_subscriptions += 1
            log.warning("subscription refused", extra={"topic_bytes": len(topic)})
            return False
        # Applies to the connection whose subscription was received last: this must come before the next recv.
        self._out.setsockopt(zmq.SUBSCRIBE, topic)
        self._publisher.granted(session)
        return True

    def _handle(self, frames: list[Any], now_s: float) -> None:
        user = user_of(frames[-1]) if self._with_users else ""
        route, *parts = [frame.bytes for frame in frames] if self._with_users else frames
        try:
            command: Command = self._decoder.decode(parts)
        except ZmqEngineError as error:
            addressee = read_addressee(parts[1] if len(parts) == 2 else b"")
            self._reply(route, *encode(self._commands.rejection(error, addressee.call, addressee.request)))
            return
        self._reply(route, *encode(self._commands.handle(command, route, user, now_s)))

    def _reply(self, route: bytes, header: bytes, body: bytes) -> None:
        try:
            self._cmd.send_multipart([route, header, body], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # The front-end is gone or does not read; it repeats the command if it still wants the answer.
            log.debug("reply dropped", extra={"reason": str(error)})


def user_of(frame: zmq.Frame) -> str:
    """The key behind a frame, as the key check named it; empty where there are no keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    # Cheaper than to try and fail, and nothing is there in most passes.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _bytes_and_user(frame: Any) -> tuple[bytes, str]:
    return (frame, "") if isinstance(frame, bytes) else (frame.bytes, user_of(frame))
