"""Inbox of the actor: subscriptions on out, commands on cmd. All work here is bounded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq
from msgspec.structs import replace

from zmqengine.errors import BadRequest, InternalError, Overloaded, ZmqEngineError
from zmqengine.protocol.codec import Addressee, command_decoder, encode, read_addressee
from zmqengine.protocol.messages import Command, Done, Hello, Image, Resume
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.intake.commands import REPLAY_BYTES_MAX, CommandHandler
from zmqengine.worker.intake.sessions import SessionTable
from zmqengine.worker.requests.images import ImageArrives, Name, SettledImage
from zmqengine.worker.telemetry.counters import PassReport
from zmqengine.worker.wire.refused_topics import RefusedTopics
from zmqengine.worker.wire.senders import process_of, user_of
from zmqengine.worker.wire.sockets import Sockets
from zmqengine.worker.wire.unread_replies import UnreadReplies

log = logging.getLogger("zmqengine.worker")

# A plain int: the "&" of an enumeration takes longer than the check of the socket.
_POLLIN = int(zmq.POLLIN)
SUBSCRIPTIONS_SECONDS_MAX = 0.005
COMMANDS_SECONDS_MAX = 0.015
MESSAGES_MAX = 1000
"""Maximum messages, and seconds, of each socket in a pass. Unread messages are left for the next pass, so that a flood
does not delay the batch."""
UNREAD_BYTES_MAX = 1 << 20
"""Maximum bytes of unread long replies of one connection."""


class _Received(NamedTuple):
    """A command that waits for an image, with its connection and user."""

    command: Command
    route: bytes
    user: str


class Inbox:
    """Reads both sockets for a bounded time. `with_users`: connections have keys, which own sessions.

    An internal error ends only the message that caused it: an insert is answered, and the worker continues.
    A command that sends or names an image whose hash is being computed is answered once that is known.
    """

    def __init__(
        self, context: WorkerContext, sockets: Sockets, sessions: SessionTable, commands: CommandHandler
    ) -> None:
        self._cmd = sockets.cmd
        self._out = sockets.out
        self._commands = commands
        self._sessions = sessions
        self._counters = context.counters
        self._decoder = command_decoder(context.limits.frame_bytes_max)
        self._wake = context.shared_status.wakeup.wake
        self._limits = context.limits
        # For each image: the command that sent it, then others that send or name it.
        self._waiting: dict[Name, list[_Received]] = {}
        self._waiting_behind = 0
        self._ready: deque[_Received] = deque()
        self._with_users = context.config.uses_curve
        self._clock = context.clock
        self._refused_topics = RefusedTopics()
        self._out_of_step = False
        self._skipping = False
        self._replies = UnreadReplies(self._cmd, bytes_max=UNREAD_BYTES_MAX)

    def read(self, report: PassReport, now_s: float) -> None:
        """Read messages within the bounds."""
        self.read_subscriptions(now_s)
        report.commands = self.read_commands(now_s)

    def read_subscriptions(self, now_s: float) -> None:
        """Grant subscriptions of sessions, and note unsubscriptions."""
        until_s = self._clock() + SUBSCRIPTIONS_SECONDS_MAX
        for _ in range(MESSAGES_MAX):
            if not _is_readable(self._out):
                # All messages are read: libzmq's lists of messages and of connections agree again.
                self._out_of_step = False
                break
            frame: Any = self._out.recv(zmq.DONTWAIT, copy=False)
            try:
                self._subscription(frame, now_s)
            except Exception as error:
                log.error("internal error in a subscription", exc_info=error)
            if self._clock() >= until_s:
                break

    def read_commands(self, now_s: float) -> int:
        """Carry out and answer waiting commands; returns the number of them."""
        handled = 0
        until_s = self._clock() + COMMANDS_SECONDS_MAX
        for settled in self._commands.settled_images():
            self._image_settled(settled)
        for _ in range(MESSAGES_MAX):
            if self._ready:
                received = self._ready.popleft()
                self._handle(received, now_s)
            elif not _is_readable(self._cmd):
                break
            else:
                handled += self._command(now_s)
            if self._clock() >= until_s:
                break
        if self._ready:
            self._wake()
        self._counters.commands += handled
        return handled

    # --- out -----------------------------------------------------------------------------------------------

    def _subscription(self, frame: zmq.Frame, now_s: float) -> None:
        event = frame.bytes
        kind, topic = event[:1], event[1:]
        if kind == b"\x01":
            self._grant(frame, topic)
        elif kind == b"\x00":
            self._withdraw(frame, topic, now_s)
        else:
            # No subscription, and no SUB socket sends it. libzmq takes the next subscriber of this round for its
            # sender: until all is read it would grant a session's topic to another front-end.
            self._out_of_step = True
            self._counters.refused_subscriptions += 1
            self._refused_topics.end(frame)

    def _grant(self, frame: zmq.Frame, topic: bytes) -> None:
        if self._out_of_step:
            # The front-end reconnects by itself, and subscribes again.
            self._refused_topics.end(frame)
            return
        session = self._sessions.subscribed(topic, user_of(frame) if self._with_users else "")
        if session is None:
            self._refuse(frame, topic)
            return
        # Applies to the connection whose subscription was received last: this must come before the next recv.
        self._out.setsockopt(zmq.SUBSCRIBE, topic)
        self._sessions.granted(session)

    def _withdraw(self, frame: zmq.Frame, topic: bytes, now_s: float) -> None:
        if self._sessions.unsubscribed(topic, now_s) is None:
            # At the end of a connection libzmq sends this for each of its topics, without a sender.
            self._refused_topics.count(frame)
        elif not self._out_of_step:
            self._out.setsockopt(zmq.UNSUBSCRIBE, topic)

    def _refuse(self, frame: zmq.Frame, topic: bytes) -> None:
        self._counters.refused_subscriptions += 1
        log.warning("subscription refused", extra={"topic_bytes": len(topic)})
        self._refused_topics.count(frame)

    # --- cmd -----------------------------------------------------------------------------------------------

    def _command(self, now_s: float) -> bool:
        """Read and answer one command, or drop one part of an over-long message; returns whether it was a command."""
        first: Any = self._cmd.recv(zmq.DONTWAIT, copy=False)
        if self._skipping:
            self._skipping = first.more
            return False
        parts: list[bytes | memoryview] = []
        more = first.more
        if more:
            parts.append(self._cmd.recv(zmq.DONTWAIT))
            more = self._cmd.getsockopt(zmq.RCVMORE)
        while more and len(parts) < 3:
            # The body may be an image: it is read where it lies.
            body: Any = self._cmd.recv(zmq.DONTWAIT, copy=False)
            parts.append(body.buffer)
            more = body.more
        # The rest of a message with very many parts is dropped within the bounds of this pass and the next ones.
        self._skipping = bool(more)
        user = user_of(first) if self._with_users else ""
        self._receive(first, parts, user, now_s)
        return True

    def _receive(
        self, first: zmq.Frame, parts: Sequence[bytes | memoryview], user: str, now_s: float
    ) -> None:
        route = first.bytes
        try:
            command: Command = self._decode(parts)
        except ZmqEngineError as error:
            self._reject(route, error, read_addressee(parts[1] if len(parts) == 2 else b""))
            return
        if isinstance(command, Resume | Hello) and not self._replies.has_room(route, REPLAY_BYTES_MAX):
            full = Overloaded("first read the replies you have asked for", retry_after_ms=100)
            self._reject(route, full, _addressee(command))
            return
        peer = user or process_of(first) if isinstance(command, Hello) else ""
        self._handle(_Received(command, route, user), now_s, peer)

    def _handle(self, received: _Received, now_s: float, peer: str = "") -> None:
        """Carry out a command and answer it, now or when the image that it needs has arrived."""
        command, route, user = received
        try:
            reply = self._commands.handle(command, route, user, now_s, peer)
            self._reply(route, *encode(reply))
        except ImageArrives as wait:
            self._wait(received, wait.name)
        except Exception as error:
            kind, addressee = type(command).__name__, _addressee(command)
            log.error(
                "internal error in a command",
                exc_info=error,
                extra={"kind": kind, "request": addressee.request},
            )
            failed = InternalError(f"the worker failed at this {kind.lower()}; see its log")
            self._reject(route, failed, addressee)

    def _wait(self, received: _Received, name: Name) -> None:
        waiting = self._waiting.setdefault(name, [])
        if waiting and self._waiting_behind >= self._limits.queued_max:
            full = Overloaded("too many requests wait for images to arrive", retry_after_ms=100)
            self._reject(received.route, full, _addressee(received.command))
            return
        command = received.command
        if isinstance(command, Image):
            # The store has the pixels that count.
            received = received._replace(command=replace(command, pixels=command.pixels[:0]))
        self._waiting_behind += bool(waiting)
        waiting.append(received)

    def _image_settled(self, settled: SettledImage) -> None:
        """Answer the commands that sent an image, and release the ones that name it."""
        waiting = self._waiting.pop(settled.name)
        self._waiting_behind -= len(waiting) - 1
        for place, received in enumerate(waiting):
            command = received.command
            if not isinstance(command, Image):
                self._ready.append(received)
            elif settled.error is None or place:
                # The first image sent with a hash decides: if its pixels were wrong, inserts ask for the image again.
                self._reply(received.route, *encode(Done(command.call, command.epoch)))
            else:
                self._reject(received.route, settled.error, _addressee(command))

    def _decode(self, parts: Sequence[bytes | memoryview]) -> Command:
        if len(parts) > 2:
            raise BadRequest("expected 2 frames (header, body), got more")
        return self._decoder.decode(parts)

    def _reject(self, route: bytes, error: ZmqEngineError, addressee: Addressee) -> None:
        self._reply(route, *encode(self._commands.rejection(error, addressee.call, addressee.request)))

    def _reply(self, route: bytes, header: bytes, body: bytes) -> None:
        if not self._replies.send(route, header, body):
            # The front-end is gone or does not read; it repeats the command if it still needs the answer.
            log.debug("reply dropped")


def _addressee(command: Command) -> Addressee:
    return Addressee(command.call, getattr(command, "request", None))


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    # Cheaper than a failing receive, and most passes have no message.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
