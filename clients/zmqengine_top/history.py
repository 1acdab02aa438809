"""Successive snapshots of a worker: rates, and the time since it fell silent."""

from __future__ import annotations

from zmqengine.protocol.launcher import ModelEntry
from zmqengine.protocol.messages import RequestInfo
from zmqengine_metrics.snapshot import Snapshot


class WorkerHistory:
    """The last snapshots of one worker. Rates are over two snapshots of one epoch, None until there are
    two."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.latest = Snapshot(worker)
        self.seen: Snapshot | None = None
        """The last snapshot with an answer."""
        self.silent_since_s: float | None = None
        self.entry: ModelEntry | None = None
        """The entry of its model, if a launcher has it."""
        self._before: Snapshot | None = None

    def take(self, snapshot: Snapshot, now_s: float) -> None:
        """Add a snapshot taken at `now_s`."""
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
        """The growth of a number per second."""
        seconds = self._seconds()
        before = self._before.number(number) if self._before is not None else None
        now = self.latest.number(number)
        if seconds is None or before is None or now is None:
            return None
        return (now - before) / seconds

    def request_rate(self, request: RequestInfo) -> float | None:
        """The output tokens of a request per second."""
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
