"""A client's sockets and its session core on an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
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

ROUNDS_MAX = 8


class LoopDriver:
    """Runs a session on an event loop: the one of the first call."""

    def __init__(
        self, session: ClientSession, keys: CurveKeys | None, on_event: Callable[[ClientEvent], None] | None
    ) -> None:
        self.session = session
        self._keys = keys
        self._on_event = on_event
        self._pid = os.getpid()
        self._rounds: _Rounds | None = None
        self._closed = False

    def check(self) -> None:
        """Raise RuntimeError if the session cannot reply any more."""
        if self._pid != os.getpid():
            raise RuntimeError("a client does not survive a fork: make a new one in this process")
        if self._closed if self._rounds is None else self._rounds.closed.done():
            raise RuntimeError("the client is closed")
        self._check_loop()

    def check_waiting(self) -> None:
        """As `check`: a waiting task blocks no other, so there is no further reason to refuse."""
        self.check()

    def start(self, request: Request) -> None:
        """Generate."""
        self.post(lambda now: self.session.start_request(request, now))

    def abort(self, request: Request) -> None:
        """Stop generating, in any thread: the garbage collector may end a stream in one."""
        if self._rounds is not None and self._pid == os.getpid():
            self._rounds.on_loop(lambda: self.post(lambda now: self.session.abort_request(request, now)))

    def open(self) -> None:
        """Bind the client to the running loop, so that a request can be aborted before it was started."""
        self.post(lambda now: None)

    def post(self, command: Callable[[float], None]) -> None:
        """Call `command` with the time; its actions are carried out in the loop's next iteration.

        Any number of commands posted in one iteration cost one round.
        """
        if self._rounds is None and not self._closed:
            self._rounds = _Rounds(self.session, self._keys, self._on_event)
        if self._rounds is not None and not self._rounds.closed.done() and self._pid == os.getpid():
            command(time.monotonic())
            self._rounds.pump_soon()

    async def close(self) -> None:
        """Say bye and close the sockets. Idempotent."""
        self._closed = True
        if self._rounds is not None and not self._rounds.closed.done() and self._pid == os.getpid():
            self._check_loop()
            self.post(self.session.close)
            await asyncio.shield(self._rounds.closed)

    def _check_loop(self) -> None:
        if self._rounds is not None and self._rounds.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "a client belongs to the event loop of its first call: make a new one in this loop"
            )


class _Rounds:
    """A session and its sockets on the running loop, without a task: socket and timer callbacks alone.

    ZeroMQ's descriptors are edge-triggered: they signal an event once. So after its wake-up, and after every send, a
    socket is read until it is empty.
    """

    def __init__(
        self, session: ClientSession, keys: CurveKeys | None, on_event: Callable[[ClientEvent], None] | None
    ) -> None:
        self._session = session
        self._on_event = on_event
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._pumping = False
        self._pump_is_due = False
        self._again = False
        self._transport = Transport(
            session.config.address,
            keys,
            watch=self._watch,
            unwatch=self._unwatch,
            launcher=session.config.model is not None,
        )

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread: at once if this is it, else soon."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self.loop:
            call()
        else:
            # A loop that is closed has no sockets left to send an abort.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(call)

    def _post(self, command: Callable[[float], None]) -> None:
        """Call `command` on the loop, from any thread."""

        def run() -> None:
            if not self.closed.done():
                command(time.monotonic())
                self.pump_soon()

        self.on_loop(run)

    def _watch(self, source: zmq.Socket[bytes]) -> None:
        self.loop.add_reader(_descriptor(source), self._read, source)
        self.pump_soon()

    def _unwatch(self, source: zmq.Socket[bytes]) -> None:
        self.loop.remove_reader(_descriptor(source))

    def _read(self, source: zmq.Socket[bytes]) -> None:
        self._transport.signalled(source)
        self._pump()

    def pump_soon(self) -> None:
        """Schedule a round for the loop's next iteration."""
        if not self._pump_is_due:
            self._pump_is_due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._pumping:
            # Called from a callback: the running round includes it.
            self._again = True
            return
        if self.closed.done():
            return
        self._pumping = True
        try:
            self._rounds()
        except Exception:
            log.exception("the client failed")
            self._session.abandon(
                WorkerLost("the client failed; its log has the reason: make a new one"), time.monotonic()
            )
        finally:
            self._pumping = False
        self._session.outbox.tell(self._on_event)
        if self._session.closed:
            self._end()
        else:
            self._set_timer()

    def _rounds(self) -> None:
        session, outbox = self._session, self._session.outbox
        for _ in range(ROUNDS_MAX):
            now = time.monotonic()
            self._again = False
            more = self._transport.receive(session, now)
            session.advance(now)
            actions = outbox.take_actions()
            self._transport.perform(actions)
            make_pixels(actions, session, self._post)
            if not (more or actions or self._again):
                return
        # Other callbacks of this loop run first.
        self.pump_soon()

    def _set_timer(self) -> None:
        due = self._session.next_deadline()
        # A timer that fires too early finds nothing to do: cheaper than moving it with every message.
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self.loop.call_later(max(0.0, due - time.monotonic()), self._timed_out)

    def _timed_out(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._pump()

    def _end(self) -> None:
        if self.closed.done():
            return
        self.closed.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()


def _descriptor(source: zmq.Socket[bytes]) -> int:
    return int(source.getsockopt(zmq.FD))
