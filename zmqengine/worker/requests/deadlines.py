"""Deadlines of live requests, the earliest first."""

from __future__ import annotations

import heapq

from zmqengine.worker.requests.live_request import LiveRequest


class Deadlines:
    """Requests by deadline. Of a discarded request only its arrival number stays, until the next compaction."""

    def __init__(self) -> None:
        self._requests: dict[int, LiveRequest] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: LiveRequest) -> None:
        """Watch a request, if it has a deadline."""
        ticket = request.ticket
        if ticket.deadline_s is not None:
            self._requests[ticket.arrival] = request
            heapq.heappush(self._heap, (ticket.deadline_s, ticket.arrival))

    def discard(self, request: LiveRequest) -> None:
        """Forget a request that ended."""
        if self._requests.pop(request.ticket.arrival, None) is not None:
            self._compact()

    def expired(self, now_s: float) -> list[LiveRequest]:
        """Requests whose deadline has passed; each is returned once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival = heapq.heappop(self._heap)
            request = self._requests.pop(arrival, None)
            if request is not None:
                due.append(request)
        return due

    def next_s(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _compact(self) -> None:
        # Amortised O(1): the entries scanned are at most twice the discards since the last compaction.
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)
