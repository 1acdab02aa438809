"""What a request needs before it may wait for a row, done on threads beside the actor.

Nothing here touches MLX. A preparation may take long, fail, or be given up because its request has ended.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from zmqengine.errors import BadRequest, ZmqEngineError
from zmqengine.protocol.messages import Insert
from zmqengine.request_rules import NO_CONSTRAINT
from zmqengine.worker.requests.live_request import LiveRequest, digest

if TYPE_CHECKING:
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

LONG_PROMPT_TOKENS = 8_192
"""From here on packing and hashing a prompt takes about as long as the rest of a pass."""
THREADS = 2

Preparation = Callable[[], Callable[[LiveRequest], None]]
"""Runs on a thread; what it returns is called by the actor with the request. Raises `ZmqEngineError` to refuse it."""


def preparation_of(insert: Insert, compiler: ConstraintCompiler | None) -> Preparation | None:
    """The preparation that this request needs, or None. Raises `BadRequest` for one that this worker cannot do."""
    if insert.constraint is not None:
        if compiler is None:
            raise BadRequest(NO_CONSTRAINT)
        return lambda: _compile(insert, compiler)
    if len(insert.prompt) >= LONG_PROMPT_TOKENS:
        return lambda: _pack(insert)
    return None


def both(first: Preparation | None, second: Preparation | None) -> Preparation | None:
    """One after the other, as one."""
    if first is None or second is None:
        return first or second

    def prepare() -> Callable[[LiveRequest], None]:
        applied = (first(), second())

        def apply(request: LiveRequest) -> None:
            for one in applied:
                one(request)

        return apply

    return prepare


def _compile(insert: Insert, compiler: ConstraintCompiler) -> Callable[[LiveRequest], None]:
    constraint = insert.constraint
    assert constraint is not None
    grammar = compiler.compile(constraint)
    # What the front-end has already must be the beginning of an output of this constraint.
    try:
        matcher = grammar.start(insert.emitted)
    except Exception as error:
        raise BadRequest(
            f"emitted cannot be the beginning of an output under this constraint: {error}"
        ) from error
    pack = _pack(insert)

    def apply(request: LiveRequest) -> None:
        pack(request)
        request.grammar = grammar
        request.is_whole = matcher.is_complete

    return apply


def _pack(insert: Insert) -> Callable[[LiveRequest], None]:
    # A list of a hundred thousand numbers takes ten times the memory of an array, for as long as the request lives.
    prompt, hashed = array("i", insert.prompt), digest(insert)

    def apply(request: LiveRequest) -> None:
        request.prompt = prompt
        request.digest = hashed

    return apply


class Preparer:
    """Runs preparations. `ring` is called from a thread when one is done; the rest is the actor's alone."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[LiveRequest, Future[Callable[[LiveRequest], None]]] = {}
        self._done: deque[LiveRequest] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, request: LiveRequest, preparation: Preparation) -> None:
        """Begin; `finished` names the request when it is done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "prepare")
        future = self._pool.submit(preparation)
        self._running[request] = future
        future.add_done_callback(lambda _: self._note(request))

    def finished(self) -> list[tuple[LiveRequest, ZmqEngineError | Exception | None]]:
        """Apply the preparations that finished since the last call; returns their requests and errors."""
        results: list[tuple[LiveRequest, ZmqEngineError | Exception | None]] = []
        while self._done:
            request = self._done.popleft()
            future = self._running.pop(request, None)
            # None: the request has ended meanwhile.
            if future is not None and not future.cancelled():
                results.append((request, _apply(request, future)))
        return results

    def cancel(self, request: LiveRequest) -> None:
        """The request has ended: forget what is done for it."""
        future = self._running.pop(request, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Begin nothing more. What runs is not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, request: LiveRequest) -> None:
        self._done.append(request)
        self._ring()


def _apply(request: LiveRequest, future: Future[Callable[[LiveRequest], None]]) -> Exception | None:
    try:
        future.result()(request)
    except Exception as error:  # noqa: BLE001 - one bad preparation ends one request
        return error
    return None
