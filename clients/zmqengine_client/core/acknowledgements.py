"""Requests that have ended and were received whole: the worker may forget them, a batch at a time."""

from __future__ import annotations

from math import inf

from zmqengine.protocol.messages import Ack
from zmqengine_client.core.calls import CallTable

WAIT_S = 0.005
BATCH_MAX = 64
MESSAGE_MAX = 4096


class Acknowledgements:
    """Collects ids for a few milliseconds, so that many ends are one message."""

    def __init__(self, calls: CallTable) -> None:
        self._calls = calls
        self._ids: dict[str, None] = {}
        self.due_at = inf

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str, now: float) -> None:
        """Acknowledge this one with the next batch."""
        self._ids[request_id] = None
        self.due_at = now if len(self._ids) >= BATCH_MAX else min(self.due_at, now + WAIT_S)

    def advance(self, now: float) -> None:
        """Send the batch if it is due."""
        if now >= self.due_at:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Send the batch."""
        ids = list(self._ids)
        self.clear()
        for start in range(0, len(ids), MESSAGE_MAX):
            part = ids[start : start + MESSAGE_MAX]
            self._calls.send(lambda call, part=part: Ack(call, part), now)  # type: ignore[misc]

    def clear(self) -> None:
        """The session they belong to is gone."""
        self._ids.clear()
        self.due_at = inf
