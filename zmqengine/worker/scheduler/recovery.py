"""Recovery from a failed engine step: find the guilty row, keep the others, stop after too many failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zmqengine.worker.requests.live_request import LiveRequest

STRIKES_MAX = 3
"""Strikes that end a request: two may be coincidence."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed step and its suspects; none, once the guilty request is found."""

    at_s: float
    suspects: set[LiveRequest]


class Recovery:
    """Orders the return of a failed batch's rows to the engine, and finds the guilty one.

    After a failed step the engine is empty, and each row that was in it is a suspect. One suspect is admitted at a
    time, on probation: the next one follows when it has made a token beside the cleared rows. If a step fails while a
    suspect is on probation, that one is guilty. A row that fails later than its first token is found by its strikes:
    the failures in the window that it was part of and that no guilty row explains.
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
        """Whether only requests named by `next_to_join` may start."""
        return bool(self._suspects) or self._on_probation is not None or bool(self._cleared)

    @property
    def waiting(self) -> int:
        """Number of requests that wait to return."""
        return len(self._suspects) + len(self._cleared)

    @property
    def has_failed_too_often(self) -> bool:
        """Whether the window holds more failures than allowed."""
        return len(self._failures) > self._failures_max

    def failed(self, in_engine: list[LiveRequest], now_s: float) -> list[LiveRequest]:
        """Record a failed step with these requests in the engine; returns the guilty ones, to end with `error`.

        The others wait here until they have a row again.
        """
        self._record(set(in_engine), now_s)
        guilty = self._convict(in_engine)
        innocent = [request for request in in_engine if request not in guilty]
        # The batch was fine before the one on probation joined, so the rest return together.
        (self._suspects if self._on_probation is None else self._cleared).extend(innocent)
        self._on_probation = None
        return guilty

    def device_failed(self, in_engine: list[LiveRequest], now_s: float) -> None:
        """Record a step that failed for a reason outside the batch: no request is a suspect, and all return together.

        A request on probation is still one.
        """
        self._record(set(), now_s)
        self._cleared.extend(request for request in in_engine if request is not self._on_probation)
        if self._on_probation is not None:
            self._suspects.appendleft(self._on_probation)
            self._on_probation = None

    def next_to_join(self) -> LiveRequest | None:
        """The request to start next: cleared ones, then one suspect at a time; None if none may start now."""
        if self._cleared:
            return self._cleared[0]
        if self._on_probation is None and self._suspects:
            return self._suspects[0]
        return None

    def joined(self, request: LiveRequest) -> None:
        """Record that the named request has a row again."""
        if self._cleared:
            assert self._cleared.popleft() is request
        else:
            assert self._suspects.popleft() is request
            self._on_probation = request

    def made_token(self, request: LiveRequest) -> None:
        """Record that a request made a token: it passed its probation."""
        if request is self._on_probation:
            self._on_probation = None

    def preempted(self, request: LiveRequest) -> bool:
        """Record a preemption. True if the request was on probation: it waits here then, not in the service order."""
        if request is not self._on_probation:
            return False
        self._on_probation = None
        self._suspects.appendleft(request)
        return True

    def discard(self, request: LiveRequest) -> None:
        """Forget a request that ended."""
        if request is self._on_probation:
            self._on_probation = None
        for waiting in (self._cleared, self._suspects):
            if request in waiting:
                waiting.remove(request)
        for failure in self._failures:
            failure.suspects.discard(request)

    def _record(self, suspects: set[LiveRequest], now_s: float) -> None:
        while self._failures and self._failures[0].at_s < now_s - self._window_s:
            self._failures.popleft()
        self._failures.append(_Failure(now_s, suspects))

    def _convict(self, in_engine: list[LiveRequest]) -> list[LiveRequest]:
        guilty = [request for request in in_engine if self._strikes(request) >= STRIKES_MAX]
        if self._on_probation is not None:
            guilty = [self._on_probation]
        for failure in self._failures:
            if not failure.suspects.isdisjoint(guilty):
                # The guilty row explains this failure, so it is no strike against the others.
                failure.suspects.clear()
        return guilty

    def _strikes(self, request: LiveRequest) -> int:
        return sum(request in failure.suspects for failure in self._failures)
