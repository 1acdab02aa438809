"""Preparation of a request before it is queued, on threads beside the actor.

Nothing here touches MLX. A preparation may take long, fail, or be cancelled because its request has ended.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Insert
from zmqengine.request_rules import NO_CONSTRAINT
from zmqengine.worker.requests.live_request import LiveRequest, Prepared, Restore, digest

if TYPE_CHECKING:
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

LONG_PROMPT_TOKENS = 8_192
"""From this length on, packing and hashing a prompt takes about as long as the rest of a pass."""
THREADS = 2
"""Of the pool, so that a prompt that is read from disk does not hold up a grammar."""

Preparation = Callable[[], Prepared]
"""Runs on a thread. Raises `ZmqEngineError` to refuse its request."""


def preparation_of(
    insert: Insert, compiler: ConstraintCompiler | None, look_up: Callable[[], Restore | None] | None
) -> Preparation | None:
    """The preparation that a request needs, if any; `look_up` finds its prompt on disk.

    Raises `BadRequest` for a constraint that this worker cannot enforce.
    """
    has_constraint = insert.constraint is not None
    if has_constraint and compiler is None:
        raise BadRequest(NO_CONSTRAINT)
    packs = has_constraint or len(insert.prompt) >= LONG_PROMPT_TOKENS
    if not packs and look_up is None:
        return None

    def prepare() -> Prepared:
        grammar, is_whole = (None, False) if compiler is None else _compile(insert, compiler)
        # A list of a hundred thousand ints takes ten times the memory of an array for as long as the request lives.
        packed = (array("i", insert.prompt), digest(insert)) if packs else None
        return Prepared(packed, grammar, is_whole, None if look_up is None else look_up())

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
    return grammar, matcher.is_complete


class Preparer:
    """Runs preparations on threads. `ring` is called from a thread when one is done; the rest is the actor's alone."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[LiveRequest, Future[Prepared]] = {}
        self._done: deque[LiveRequest] = deque()

    def start(self, request: LiveRequest, preparation: Preparation) -> None:
        """Run a preparation; `finished` returns its result."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "prepare")
        future = self._pool.submit(preparation)
        self._running[request] = future
        future.add_done_callback(lambda _: self._note(request))

    def finished(self) -> list[tuple[LiveRequest, Prepared | BaseException]]:
        """Results and errors of the preparations that finished since the last call."""
        results: list[tuple[LiveRequest, Prepared | BaseException]] = []
        while self._done:
            request = self._done.popleft()
            future = self._running.pop(request, None)
            # None: the request has ended meanwhile.
            if future is not None and not future.cancelled():
                try:
                    results.append((request, future.result()))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a panic of a Rust library is no Exception
                    results.append((request, error))
        return results

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request's preparation, if it has one: the request has ended."""
        future = self._running.pop(request, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Start nothing more. Running preparations are not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, request: LiveRequest) -> None:
        self._done.append(request)
        self._ring()
