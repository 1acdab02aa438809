"""Recovery from a failed engine step: find the guilty row, keep the others, stop after too many failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zmqengine.worker.requests.live_request import LiveRequest

STRIKES_MAX = 3
"""Failed steps with no suspect on probation that one request may be part of."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed step, and whom it may be the fault of; nobody, once the guilty one is found."""

    at_s: float
    suspects: set[LiveRequest]


class Recovery:
    """Says in which order the rows of a failed batch go back into the engine.

    After a failed step the engine is empty. Each row that was in it is a suspect: it joins alone, and the next one
    only after it has made a token beside those that are cleared. If a step fails while a suspect is on probation,
    that one is guilty. A row that fails later than its first token is found by its strikes: the failures in the window
    that nobody was found guilty of, and that it was part of.
    """

    def __init__(self, *, failures_max: int, window_s: float) -> None:
        self._failures_max = failures_max
        self._window_s = window_s
        self._failures: deque[_Failure] = deque()
        self._cleared: deque[LiveRequest] = deque()
        self._suspects: deque[LiveRequest] = deque()
        self._on_probation: LiveRequest | None = None

    @property
    def is_active(self) -> bool:
        """Whether only those it names may join the batch."""
        return bool(self._suspects) or self._on_probation is not None or bool(self._cleared)

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn to go back."""
        return len(self._suspects) + len(self._cleared)

    @property
    def has_failed_too_often(self) -> bool:
        """Whether there were more failures than allowed in the window."""
        return len(self._failures) > self._failures_max

    def failed(self, in_engine: list[LiveRequest], now_s: float) -> list[LiveRequest]:
        """Record a failed step with these rows in the engine; returns the requests to end with `error`.

        The others are held here until they have joined again.
        """
        while self._failures and self._failures[0].at_s < now_s - self._window_s:
            self._failures.popleft()
        self._failures.append(_Failure(now_s, set(in_engine)))
        guilty = self._convict(in_engine)
        innocent = [request for request in in_engine if request not in guilty]
        # The batch was fine until the one on probation joined: then the rest go back together.
        (self._suspects if self._on_probation is None else self._cleared).extend(innocent)
        self._on_probation = None
        return guilty

    def next_to_join(self) -> LiveRequest | None:
        """The row that joins the batch next: cleared ones, then one suspect at a time; None for none now."""
        if self._cleared:
            return self._cleared[0]
        if self._on_probation is None and self._suspects:
            return self._suspects[0]
        return None

    def joined(self, request: LiveRequest) -> None:
        """The one that was named has a row again."""
        if self._cleared:
            assert self._cleared.popleft() is request
        else:
            assert self._suspects.popleft() is request
            self._on_probation = request

    def made_token(self, request: LiveRequest) -> None:
        """A step with this request succeeded."""
        if request is self._on_probation:
            self._on_probation = None

    def lost_row(self, request: LiveRequest) -> bool:
        """The request has no row any more without having ended; returns whether its way back leads through here."""
        if request is not self._on_probation:
            return False
        self._on_probation = None
        self._suspects.appendleft(request)
        return True

    def discard(self, request: LiveRequest) -> None:
        """The request has ended."""
        if request is self._on_probation:
            self._on_probation = None
        for waiting in (self._cleared, self._suspects):
            if request in waiting:
                waiting.remove(request)
        for failure in self._failures:
            failure.suspects.discard(request)

    def _convict(self, in_engine: list[LiveRequest]) -> list[LiveRequest]:
        guilty = [request for request in in_engine if self._strikes(request) >= STRIKES_MAX]
        if self._on_probation is not None:
            guilty = [self._on_probation]
        for failure in self._failures:
            if not failure.suspects.isdisjoint(guilty):
                # That explains it: it is held against nobody else.
                failure.suspects.clear()
        return guilty

    def _strikes(self, request: LiveRequest) -> int:
        return sum(request in failure.suspects for failure in self._failures)
