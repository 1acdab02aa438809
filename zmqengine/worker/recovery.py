"""What happens when a step of the engine fails: find the guilty row, keep the others, and know when to stop."""

from __future__ import annotations

from collections import deque

from zmqengine.worker.request import LiveRequest

STRIKES_MAX = 3
"""Failed steps with no suspect on probation that one request may be part of."""


class Recovery:
    """Puts the rows of a failed batch back one at a time.

    After a failed step the engine is empty. Each suspect joins alone, and the next one only after it has made a
    token beside the cleared ones. If a step fails while a suspect is on probation, that one is guilty. A row that
    fails later than its first token is found by its strikes.
    """

    def __init__(self, *, failures_max: int, window_s: float) -> None:
        self._failures_max = failures_max
        self._window_s = window_s
        self._failures: deque[float] = deque()
        self._suspects: deque[LiveRequest] = deque()
        self._on_probation: LiveRequest | None = None
        self._cleared: list[LiveRequest] = []

    @property
    def is_active(self) -> bool:
        """Whether only suspects may join the batch."""
        self._drop_ended()
        return bool(self._suspects) or self._on_probation is not None or bool(self._cleared)

    def failed(self, batch: list[LiveRequest], now_s: float) -> list[LiveRequest]:
        """Record a failed step with this batch; returns the requests to end with `error`."""
        self._failures.append(now_s)
        while self._failures[0] < now_s - self._window_s:
            self._failures.popleft()
        if len(self._failures) == 1:
            # Strikes of long ago say nothing about this failure.
            for request in batch:
                request.strikes = 0
        self._drop_ended()
        guilty = self._convict(batch)
        innocent = [request for request in batch if request not in guilty]
        if self._on_probation is not None:
            # The batch was fine until the one on probation joined: the rest go back together.
            self._cleared.extend(innocent)
        else:
            self._suspects.extend(innocent)
        self._on_probation = None
        return guilty

    @property
    def has_failed_too_often(self) -> bool:
        """Whether there were more failures than allowed in the window."""
        return len(self._failures) > self._failures_max

    def next_to_join(self) -> list[LiveRequest]:
        """Who joins the batch in this pass: those cleared, then one suspect on probation."""
        self._drop_ended()
        if self._cleared:
            cleared, self._cleared = self._cleared, []
            return cleared
        if self._on_probation is None and self._suspects:
            self._on_probation = self._suspects.popleft()
            return [self._on_probation]
        return []

    def made_token(self, request: LiveRequest) -> None:
        """A step with this request succeeded."""
        if request is self._on_probation:
            self._on_probation = None

    def _convict(self, batch: list[LiveRequest]) -> list[LiveRequest]:
        if self._on_probation is not None:
            return [self._on_probation]
        for request in batch:
            request.strikes += 1
        return [request for request in batch if request.strikes >= STRIKES_MAX]

    def _drop_ended(self) -> None:
        if not self._suspects and self._on_probation is None and not self._cleared:
            return
        if self._on_probation is not None and self._on_probation.end is not None:
            self._on_probation = None
        self._suspects = deque(request for request in self._suspects if request.end is None)
        self._cleared = [request for request in self._cleared if request.end is None]
