"""What two looks at a worker tell that one does not: rates, and since when it has been silent."""

from __future__ import annotations

from zmqengine.protocol.messages import RequestInfo
from zmqengine_metrics.snapshot import Snapshot


class WorkerHistory:
    """One worker over time. Rates are over the last two looks at the same life of it, and None before."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.latest = Snapshot(worker)
        self.seen: Snapshot | None = None
        """The last one that had an answer."""
        self.silent_since_s: float | None = None
        self._before: Snapshot | None = None

    def take(self, snapshot: Snapshot, now_s: float) -> None:
        """Look again."""
        self.latest = snapshot
        if snapshot.status is None:
            self._before = None
            if self.silent_since_s is None:
                self.silent_since_s = now_s
            return
        self.silent_since_s = None
        before = self.seen
        same = (
            before is not None and before.status is not None and before.status.epoch == snapshot.status.epoch
        )
        self._before = before if same else None
        self.seen = snapshot

    def rate(self, number: str) -> float | None:
        """By how much a number grew in a second."""
        seconds = self._seconds()
        before = self._before.number(number) if self._before is not None else None
        now = self.latest.number(number)
        if seconds is None or before is None or now is None:
            return None
        return (now - before) / seconds

    def request_rate(self, request: RequestInfo) -> float | None:
        """Tokens that a request made in a second."""
        seconds = self._seconds()
        if seconds is None or self._before is None or self._before.status is None:
            return None
        for earlier in self._before.status.requests:
            if (earlier.session, earlier.request) == (request.session, request.request):
                return (request.output_tokens - earlier.output_tokens) / seconds
        return request.output_tokens / seconds

    def _seconds(self) -> float | None:
        if self._before is None or self._before.status is None or self.latest.status is None:
            return None
        passed_s = self.latest.status.uptime_s - self._before.status.uptime_s
        return passed_s if passed_s > 0 else None
