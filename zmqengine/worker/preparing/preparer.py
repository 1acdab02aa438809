"""Preparation of a request before it is queued, on threads beside the actor.

Nothing here touches MLX. A preparation may take long, fail, hang, or be cancelled because its request has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Insert
from zmqengine.request_rules import NO_CONSTRAINT
from zmqengine.worker.requests.live_request import LiveRequest, Prepared, digest

if TYPE_CHECKING:
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

LONG_PROMPT_TOKENS = 8_192
"""Tokens of a prompt from which packing and hashing it takes about as long as the rest of a pass."""
THREADS = 4
"""Threads of all preparations. Compiling and reading release the interpreter's lock; the four slowest grammars at once
hold up the preparation of others, and no stream."""
_CLOSE_S = 0.5
"""Maximum seconds to wait for running preparations when the worker ends: native code should return before the
interpreter is gone; a hanging read never does."""

Preparation = Callable[[], Prepared]
"""A preparation, run on a thread. Raises `ZmqEngineError` to refuse its request."""


def preparation_of(insert: Insert, compiler: ConstraintCompiler | None) -> Preparation | None:
    """The preparation that a request's contents need, if any.

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

    return prepare


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
    """Runs preparations on a few threads, those of the best class first, in a class as they came.

    `wake` is called from a thread when one is done; the rest is the actor's alone. The threads are daemons: one that
    hangs must not keep the process from ending.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self._numbers = count()
        self._queue: queue.PriorityQueue[tuple[int, int, _Task | None]] = queue.PriorityQueue()
        self._tasks: dict[LiveRequest, _Task] = {}
        self._done: deque[tuple[_Task, Prepared | BaseException]] = deque()

    def start(self, request: LiveRequest, preparation: Preparation) -> None:
        """Run a preparation; `finished` returns its result."""
        task = self._tasks[request] = _Task(request, preparation)
        self._queue.put((request.ticket.priority_class, next(self._numbers), task))
        if len(self._threads) < min(THREADS, len(self._tasks)):
            thread = threading.Thread(target=self._serve, name="prepare", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finished(self) -> list[tuple[LiveRequest, Prepared | BaseException]]:
        """Results and errors of the preparations that finished since the last call."""
        results: list[tuple[LiveRequest, Prepared | BaseException]] = []
        while self._done:
            task, result = self._done.popleft()
            # Another task, or none: the preparation was cancelled since.
            if self._tasks.get(task.request) is not task:
                continue
            del self._tasks[task.request]
            if isinstance(result, KeyboardInterrupt | SystemExit):
                raise result
            results.append((task.request, result))
        return results

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request's preparation, if it has one."""
        task = self._tasks.pop(request, None)
        if task is not None:
            task.preparation = None

    def close(self) -> None:
        """Start no further preparation, and wait for running ones within a bound."""
        until_s = time.monotonic() + _CLOSE_S
        for _ in self._threads:
            self._queue.put((-1, next(self._numbers), None))
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Wait for the next preparation and run it; False once the preparer is closed.

        A function of its own: an idle thread that held its last preparation would keep a prompt, and a grammar.
        """
        task = self._queue.get()[2]
        if task is None:
            return False
        preparation, task.preparation = task.preparation, None
        if preparation is not None:
            self._done.append((task, _outcome(preparation)))
            self._wake()
        return True


@dataclass(eq=False, slots=True)
class _Task:
    """`preparation` is None once a thread has taken it, or it was cancelled."""

    request: LiveRequest
    preparation: Preparation | None
