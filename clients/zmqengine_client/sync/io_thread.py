"""The thread that owns a client's sockets and its session core."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import zmq

from zmqengine.errors import WorkerLost
from zmqengine_client.core.outbox import ClientEvent
from zmqengine_client.core.request import Request
from zmqengine_client.core.session import ClientSession
from zmqengine_client.keys import CurveKeys
from zmqengine_client.pixel_making import make_pixels
from zmqengine_client.transport import Transport

log = logging.getLogger("zmqengine.client")

POLL_MS_MAX = 3_600_000
CLOSE_WAIT_S = 2.0

Command = Callable[[float], None]


class IoThread:
    """Runs a session in the background until it is closed or collected, or the interpreter ends.

    `start`, `abort` and `post` are safe from any thread and from a finaliser.
    """

    def __init__(
        self, session: ClientSession, keys: CurveKeys | None, on_event: Callable[[ClientEvent], None] | None
    ) -> None:
        self.session = session
        self._rounds = _Rounds(session, keys, on_event)
        self._thread = threading.Thread(target=self._rounds.run, name="zmqengine-client", daemon=True)
        self._thread.start()
        # Not a __del__: this also says bye when the interpreter ends.
        self._finalizer = weakref.finalize(self, _close, self._rounds, self._thread)

    def check(self) -> None:
        """Raise RuntimeError if there is no thread to wait for."""
        if self._rounds.forked:
            raise RuntimeError("a client does not survive a fork: make a new one in this process")
        if self._rounds.ended.is_set():
            raise RuntimeError("the client is closed")

    def check_waiting(self) -> None:
        """As `check`, and raise on the I/O thread itself: a call in `on_event` would deadlock."""
        self.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "on_event must not wait for the client that calls it: hand over to another thread"
            )

    def start(self, request: Request) -> None:
        """Generate."""
        self.post(lambda now: self.session.start_request(request, now))

    def abort(self, request: Request) -> None:
        """Stop generating."""
        self.post(lambda now: self.session.abort_request(request, now))

    def post(self, command: Command) -> None:
        """Have `command` called with the time on the I/O thread, soon. Dropped when the thread has ended."""
        self._rounds.post(command)

    def close(self) -> None:
        """Say bye and end the thread. Idempotent; in a forked child it does nothing."""
        self._finalizer()


def _close(rounds: _Rounds, thread: threading.Thread) -> None:
    if rounds.forked or rounds.ended.is_set():
        return
    rounds.post(rounds.session.close)
    if threading.current_thread() is not thread:
        thread.join(CLOSE_WAIT_S)


class _Rounds:
    """The loop of the thread. It references no object of a caller, so that clients can be collected."""

    def __init__(
        self, session: ClientSession, keys: CurveKeys | None, on_event: Callable[[ClientEvent], None] | None
    ) -> None:
        self.session = session
        self._on_event = on_event
        self._pid = os.getpid()
        self._commands: deque[Command] = deque()
        self._poller = zmq.Poller()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._transport = Transport(
            session.config.address,
            keys,
            watch=self._watch,
            unwatch=self._poller.unregister,
            launcher=session.config.model is not None,
        )
        self.ended = threading.Event()
        # Reentrant, as a finaliser may post in the middle of `post`.
        self._posting = threading.RLock()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, in which the thread does not run."""
        return self._pid != os.getpid()

    def post(self, command: Command) -> None:
        """See `IoThread.post`."""
        if self.forked:
            return
        with self._posting:
            if self.ended.is_set():
                return
            self._commands.append(command)
            # A full pipe already wakes the thread.
            with contextlib.suppress(BlockingIOError):
                self._wake.send(b"\0")

    def _watch(self, source: zmq.Socket[bytes]) -> None:
        self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Rounds until the session is closed."""
        session = self.session
        try:
            while not session.closed:
                for source, _ in self._poller.poll(self._wait_ms()):
                    if isinstance(source, zmq.Socket):
                        self._transport.signalled(source)
                self._round(time.monotonic())
        except Exception:
            # A bug in the core: no caller may wait for ever on a thread that is gone.
            log.exception("the client's I/O thread failed")
            session.abandon(
                WorkerLost("the client failed; its log has the reason: make a new one"), time.monotonic()
            )
        finally:
            with self._posting:
                self.ended.set()
                self._woken.close()
                self._wake.close()
            # Requests that were started since the session was closed end with it.
            self._run_commands(time.monotonic())
            self.session.outbox.tell(self._on_event)
            self._transport.close()

    def _round(self, now: float) -> None:
        session, outbox = self.session, self.session.outbox
        with contextlib.suppress(BlockingIOError):
            while len(self._woken.recv(4096)) == 4096:
                continue
        self._run_commands(now)
        self._transport.receive(session, now)
        session.advance(now)
        actions = outbox.take_actions()
        self._transport.perform(actions)
        make_pixels(actions, session, self.post)
        self.session.outbox.tell(self._on_event)

    def _run_commands(self, now: float) -> None:
        while self._commands:
            self._commands.popleft()(now)

    def _wait_ms(self) -> int | None:
        wait_s = self.session.next_deadline() - time.monotonic()
        return None if wait_s == math.inf else max(0, min(POLL_MS_MAX, math.ceil(wait_s * 1000)))
