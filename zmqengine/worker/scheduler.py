"""Who is served next: a queue by priority and arrival, and admission by memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from zmqengine.worker.request import LiveRequest


class Scheduler:
    """Requests that wait, and the projected KV bytes of those that run.

    Service is strictly in order of (priority, arrival). When the first in line does not fit in memory yet,
    nobody overtakes it: so whoever fits an empty worker is served in the end.
    """

    def __init__(self, *, rows_max: int, kv_bytes_max: int) -> None:
        self._rows_max = rows_max
        self._kv_bytes_max = kv_bytes_max
        self._heap: list[tuple[int, int, LiveRequest]] = []
        self._queued = 0
        self._deadlines: list[tuple[float, int, LiveRequest]] = []
        self.running: dict[int, LiveRequest] = {}
        self.running_bytes = 0
        self._next_row = 0

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.running) or self._queued > 0

    @property
    def is_full(self) -> bool:
        """Whether every row is taken."""
        return len(self.running) >= self._rows_max

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return self._queued

    @property
    def kv_bytes_max(self) -> int:
        """Bytes of KV cache that all running requests together may come to hold."""
        return self._kv_bytes_max

    def enqueue(self, request: LiveRequest) -> None:
        """Put a new request in line."""
        heapq.heappush(self._heap, (request.priority, request.arrival, request))
        self._queued += 1
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.arrival, request))

    def head(self) -> LiveRequest | None:
        """The request that is served next, if any waits."""
        while self._heap and self._heap[0][2].phase != "queued":
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def has_room_for(self, request: LiveRequest, *, beside_bytes: int = 0) -> bool:
        """Whether a row is free and the projected bytes fit, with `beside_bytes` held by something else."""
        if self.is_full:
            return False
        return self.running_bytes + request.projected_bytes + beside_bytes <= self._kv_bytes_max

    def start_head(self) -> LiveRequest:
        """Take the head of the line into the batch, under a row id never used before."""
        _, _, request = heapq.heappop(self._heap)
        self._queued -= 1
        request.phase = "running"
        self.running_bytes += request.projected_bytes
        self._number(request)
        return request

    def renumber(self, request: LiveRequest) -> None:
        """Give a running request a fresh row id: its old row was lost with the batch."""
        del self.running[request.row]
        self._number(request)

    def leave(self, request: LiveRequest) -> None:
        """Take a request out of the line or the batch, before its phase changes."""
        if request.phase == "queued":
            self._queued -= 1
        elif request.phase == "running" and self.running.pop(request.row, None) is not None:
            self.running_bytes -= request.projected_bytes

    def waiting(self) -> Iterator[LiveRequest]:
        """Every request in line, in no order."""
        return (request for _, _, request in list(self._heap) if request.phase == "queued")

    def _number(self, request: LiveRequest) -> None:
        request.row = self._next_row
        self._next_row += 1
        self.running[request.row] = request

    def expired(self, now_s: float) -> list[LiveRequest]:
        """Requests whose deadline has passed; each is named once."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if request.phase != "ended":
                due.append(request)
        return due
