"""The control thread: answers on ctl independently of the actor. It never touches MLX."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from zmqengine.errors import InternalError, NotAuthorized, Overloaded, ZmqEngineError
from zmqengine.protocol.addresses import Endpoints
from zmqengine.protocol.codec import control_decoder, encode, read_addressee
from zmqengine.protocol.messages import ControlReply, ControlRequest
from zmqengine.worker.intake.control import LONG_REPLIES, ControlHandler
from zmqengine.worker.process.wakeup import Wakeup
from zmqengine.worker.telemetry.shared_status import SharedStatus
from zmqengine.worker.wire.auth import Guard
from zmqengine.worker.wire.senders import user_of
from zmqengine.worker.wire.unread_replies import UnreadReplies

log = logging.getLogger("zmqengine.control")

UNREAD_BYTES_MAX = 1 << 20
"""Maximum bytes of unread long replies of one connection; the first reply may be longer."""
UNREAD_BYTES_ALL_MAX = 64 << 20
"""Maximum bytes of unread long replies of all connections."""
FAILURE_WAIT_S = 0.1
"""Seconds before the loop goes on after a failure, whose cause may persist."""
LOOK_AGAIN_S = 1.0
"""Maximum seconds between two looks at the address's file and at the watched connections."""


class Watched(Protocol):
    """A descriptor that the control thread polls beside ctl: the supervisor's pipe, the key check."""

    def fileno(self) -> int:
        """File descriptor to poll for reading."""
        ...

    def check(self) -> object:
        """Called when it is readable."""
        ...


class ControlThread:
    """Serves ctl until stopped. Owns the socket, which is used on this thread only.

    With a `guard` it also serves the key check, and only an operator's key may drain the worker. `keep_ctl` is called
    about once a second.
    """

    def __init__(
        self,
        ctl: zmq.Socket[bytes],
        shared_status: SharedStatus,
        *,
        name: str,
        endpoints: Endpoints,
        guard: Guard | None = None,
        keep_ctl: Callable[[], None] = lambda: None,
    ) -> None:
        self._ctl = ctl
        self._keep_ctl = keep_ctl
        self._shared_status = shared_status
        self._handler = ControlHandler(shared_status, name, endpoints, guard)
        self._guard = guard
        self._decoder = control_decoder()
        self._replies = UnreadReplies(ctl, bytes_max=UNREAD_BYTES_MAX, all_bytes_max=UNREAD_BYTES_ALL_MAX)
        self._stop_reader, self._stop_writer = os.pipe()
        self._answers = _Answers(shared_status, self._send)
        self._watched: list[Watched] = [self._answers, *([] if guard is None else [guard])]
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def watch(self, watched: Watched) -> None:
        """Poll another descriptor as well; called before `start`."""
        self._watched.append(watched)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and wait for the thread. Idempotent."""
        if self._stop_writer >= 0:
            os.close(self._stop_writer)
            self._stop_writer = -1
            if self._thread.ident is not None:
                self._thread.join()
            os.close(self._stop_reader)
            self._answers.close()

    def _run(self) -> None:
        """Serve, and continue after a failure: without this thread no peer could connect, ask or drain."""
        while True:
            try:
                self._serve()
                return
            except Exception as error:
                self._shared_status.control_failures += 1
                log.error("the control thread failed and continues", exc_info=error)
                # With a delay, since the cause may persist.
                if select.select([self._stop_reader], [], [], FAILURE_WAIT_S)[0]:
                    return

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ctl, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        for watched in list(self._watched):
            poller.register(watched.fileno(), zmq.POLLIN)
            # A ZeroMQ descriptor signals changes only, not messages that arrived before the first poll.
            if watched.check():
                poller.unregister(watched.fileno())
                self._watched.remove(watched)
        look_again_s = 0.0
        while True:
            ready = dict(poller.poll(int(LOOK_AGAIN_S * 1000)))
            if self._stop_reader in ready:
                return
            # By the clock: under load a socket is always readable.
            is_due = not ready or time.monotonic() >= look_again_s
            if is_due:
                look_again_s = time.monotonic() + LOOK_AGAIN_S
                self._keep_ctl()
            for watched in list(self._watched):
                if (is_due or watched.fileno() in ready) and watched.check():
                    poller.unregister(watched.fileno())
                    self._watched.remove(watched)
            if self._ctl in ready:
                self._answer()

    def _answer(self) -> None:
        """Answer one request; an internal error ends this request only."""
        first: Any = self._ctl.recv(zmq.DONTWAIT, copy=False)
        parts: list[bytes] = []
        more = first.more
        while more:
            part = self._ctl.recv(zmq.DONTWAIT)
            more = self._ctl.getsockopt(zmq.RCVMORE)
            # Keep enough of a message with too many parts to refuse it.
            if len(parts) < 3:
                parts.append(part)
        route, user = first.bytes, user_of(first) if self._guard is not None else ""
        call = read_addressee(parts[1]).call if len(parts) == 2 else 0
        reply: ControlReply | None
        try:
            reply = self._reply(first, parts, user)
        except ZmqEngineError as error:
            reply = self._handler.rejection(call, error)
        except Exception as error:
            log.error("internal error in a control request", exc_info=error, extra={"call": call})
            failed = InternalError("the worker failed at this request; see its log")
            reply = self._handler.rejection(call, failed)
        if reply is not None:
            self._send(route, reply)

    def _send(self, route: bytes, reply: ControlReply) -> None:
        if not self._replies.send(route, *encode(reply)):
            log.debug("control reply dropped")

    def _reply(self, first: zmq.Frame, parts: list[bytes], user: str) -> ControlReply | None:
        request: ControlRequest = self._decoder.decode(parts)
        if self._guard is not None and not self._guard.is_known(user):
            raise NotAuthorized("this key was removed")
        if isinstance(request, LONG_REPLIES) and not self._replies.has_room(
            first.bytes, self._handler.long_bytes(request)
        ):
            raise Overloaded("first read the replies you have asked for", retry_after_ms=100)
        return self._handler.handle(request, user, first.bytes)


class _Answers:
    """Sends what the actor answers: `Watched`, readable when there is something to send."""

    def __init__(self, shared_status: SharedStatus, send: Callable[[bytes, ControlReply], None]) -> None:
        self._shared_status = shared_status
        self._send = send
        self._wakeup = Wakeup()
        shared_status.answered = self._wakeup.wake

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def check(self) -> None:
        """Send all."""
        self._wakeup.clear()
        while self._shared_status.answers:
            self._send(*self._shared_status.answers.popleft())

    def close(self) -> None:
        """Later answers are not sent."""
        self._wakeup.close()
