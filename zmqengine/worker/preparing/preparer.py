"""Preparation of a request before it is queued, on threads beside the actor.

Nothing here touches MLX. A preparation may take long, fail, hang, or be cancelled because its request has ended.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Insert
from zmqengine.request_rules import NO_CONSTRAINT
from zmqengine.worker.requests.live_request import LiveRequest, Prepared, digest
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import ServiceOrder

if TYPE_CHECKING:
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

LONG_PROMPT_TOKENS = 8_192
"""Tokens of a prompt from which packing and hashing it takes about as long as the rest of a pass."""
LaneName = Literal["compile", "pack", "look up", "read"]
"""Kind of a preparation. A slow one holds up none of another kind."""
_THREADS: dict[LaneName, int] = {"compile": 4, "pack": 1, "look up": 1, "read": 2}
"""Threads of each lane. Compilation releases the interpreter's lock, so more threads keep slow grammars from blocking
others; two reads keep a disk busy."""
_CLOSE_S = 0.5
"""Maximum seconds to wait for running preparations when the worker ends: native code should return before the
interpreter is gone; a hanging read never does."""

Preparation = Callable[[], Prepared]
"""A preparation, run on a thread. Raises `ZmqEngineError` to refuse its request."""


def preparation_of(
    insert: Insert, compiler: ConstraintCompiler | None
) -> tuple[Preparation, LaneName] | None:
    """The preparation that a request's contents need, if any, and its lane.

    Raises `BadRequest` for a constraint that this worker cannot enforce.
    """
    has_constraint = insert.constraint is not None
    if has_constraint and compiler is None:
        raise BadRequest(NO_CONSTRAINT)
    is_bounded = compiler is not None and insert.thinking_max is not None
    if not (has_constraint or is_bounded) and len(insert.prompt) < LONG_PROMPT_TOKENS:
        return None

    def prepare() -> Prepared:
        grammar, is_whole, thinking = None, False, None
        if compiler is not None:
            grammar, is_whole = _compile(insert, compiler)
            if insert.thinking_max is not None:
                thinking = compiler.bound_thinking(insert.thinking_max)
        # A list of a hundred thousand ints takes ten times the memory of an array for as long as the request lives.
        return Prepared((array("i", insert.prompt), digest(insert)), grammar, is_whole, thinking)

    return prepare, "compile" if has_constraint else "pack"


def _compile(insert: Insert, compiler: ConstraintCompiler) -> tuple[Grammar | None, bool]:
    """The grammar of a request's constraint, and whether `emitted` is already a whole output of it."""
    if insert.constraint is None:
        return None, False
    grammar = compiler.compile(insert.constraint)
    try:
        matcher = grammar.start(insert.emitted)
    except Exception as error:
        raise BadRequest(
            f"emitted cannot be the beginning of an output under this constraint: {error}"
        ) from error
    # Kept for the row, which the actor starts.
    grammar.keep(matcher)
    return grammar, matcher.is_complete


def _outcome(preparation: Preparation) -> Prepared | BaseException:
    """The result or the error of a preparation.

    A function of its own: the frames of an error are in a cycle with a variable of theirs that holds it, and a refused
    constraint takes megabytes until the garbage collector finds it.
    """
    try:
        return preparation()
    except BaseException as error:  # noqa: BLE001 - a panic of a Rust library is no Exception
        return error


class Preparer:
    """Runs preparations on threads. `wake` is called from a thread when one is done; the rest is the actor's alone."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lanes: dict[LaneName, _Lane] = {}
        self._running: dict[LiveRequest, tuple[_Lane, Ticket]] = {}
        self._done: deque[tuple[LiveRequest, Ticket, Prepared | BaseException]] = deque()

    def start(self, request: LiveRequest, preparation: Preparation, lane_name: LaneName) -> None:
        """Run a preparation; `finished` returns its result."""
        lane = self._lanes.get(lane_name)
        if lane is None:
            lane = self._lanes[lane_name] = _Lane(lane_name)
        # A lane has an order of service of its own, fair by the time of its threads.
        ticket = replace(request.ticket, phase="new", prompt_tokens=0)

        def run() -> None:
            self._done.append((request, ticket, _outcome(preparation)))

        self._running[request] = (lane, ticket)
        lane.start(ticket, run, self._wake)

    def finished(self) -> list[tuple[LiveRequest, Prepared | BaseException]]:
        """Results and errors of the preparations that finished since the last call."""
        results: list[tuple[LiveRequest, Prepared | BaseException]] = []
        while self._done:
            request, ticket, result = self._done.popleft()
            # Another ticket, or none: the preparation was cancelled since.
            if self._running.get(request, (None, None))[1] is not ticket:
                continue
            del self._running[request]
            if isinstance(result, KeyboardInterrupt | SystemExit):
                raise result
            results.append((request, result))
        return results

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request's preparation, if it has one."""
        lane, ticket = self._running.pop(request, (None, None))
        if lane is not None and ticket is not None:
            lane.cancel(ticket)

    def give_up(self, request: LiveRequest) -> None:
        """Cancel a preparation that takes too long: its thread counts as stuck until it returns."""
        lane, ticket = self._running.pop(request, (None, None))
        if lane is not None and ticket is not None:
            lane.cancel(ticket, is_stuck=True)

    def free_threads(self, lane_name: LaneName) -> int:
        """Number of a lane's threads that would start another preparation at once."""
        lane = self._lanes.get(lane_name)
        return _THREADS[lane_name] if lane is None else lane.free_threads

    def is_stuck(self, lane_name: LaneName) -> bool:
        """Whether every thread of a lane has a preparation that was given up."""
        lane = self._lanes.get(lane_name)
        return lane is not None and lane.is_stuck

    def close(self) -> None:
        """Start no further preparation, and wait for running ones within a bound."""
        until_s = time.monotonic() + _CLOSE_S
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.join(until_s)


class _Lane:
    """Threads of one kind of preparation, the next one by an order of service.

    The threads are daemons: one that hangs must not keep the process from ending.
    """

    def __init__(self, name: LaneName) -> None:
        self._name = name
        self._threads_max = _THREADS[name]
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # The fields below are guarded by `_changed`.
        self._order = ServiceOrder()
        self._tasks: dict[Ticket, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._running: set[Ticket] = set()
        self._stuck: set[Ticket] = set()
        self._closed = False

    @property
    def free_threads(self) -> int:
        with self._changed:
            return max(0, self._threads_max - len(self._running) - len(self._order))

    @property
    def is_stuck(self) -> bool:
        with self._changed:
            return len(self._stuck) >= self._threads_max

    def start(self, ticket: Ticket, run: Callable[[], None], wake: Callable[[], None]) -> None:
        with self._changed:
            self._tasks[ticket] = (run, wake)
            self._order.enqueue(ticket, time.monotonic())
            if len(self._threads) < min(self._threads_max, len(self._tasks)):
                thread = threading.Thread(target=self._serve, name=f"prepare: {self._name}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def cancel(self, ticket: Ticket, *, is_stuck: bool = False) -> None:
        with self._changed:
            if ticket.phase == "waiting":
                self._order.withdraw(ticket)
                del self._tasks[ticket]
            elif is_stuck and ticket in self._running:
                self._stuck.add(ticket)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, until_s: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Wait for the next preparation and run it; False once the lane is closed.

        A function of its own: an idle thread that held its last preparation would keep a prompt, and a grammar.
        """
        task = self._next()
        if task is None:
            return False
        ticket, run, wake = task
        started_s = time.monotonic()
        run()
        with self._changed:
            self._order.charge(ticket, 0, round(1000 * (time.monotonic() - started_s)))
            self._order.withdraw(ticket)
            self._running.discard(ticket)
            self._stuck.discard(ticket)
            del self._tasks[ticket]
        # Called when the thread is free, so that the actor can give it the next preparation.
        wake()
        return True

    def _next(self) -> tuple[Ticket, Callable[[], None], Callable[[], None]] | None:
        with self._changed:
            while not self._closed and not len(self._order):
                self._changed.wait()
            ticket = None if self._closed else self._order.first(time.monotonic())
            if ticket is None:
                return None
            self._order.start(ticket, time.monotonic())
            self._running.add(ticket)
            return ticket, *self._tasks[ticket]
