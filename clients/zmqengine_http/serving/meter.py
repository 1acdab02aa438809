"""Counts of this front-end's own requests."""

from __future__ import annotations

import contextlib
import functools
import os
import struct

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

COUNTS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The variable of prometheus_client for where several processes keep their counts, so that each can tell those of all.
It has to be set before they start."""


_READS_MAX = 5


class Meter:
    """Counts the requests of one front-end, which may have several processes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "zmqengine_http_requests",
            "HTTP requests that were answered.",
            ["path", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "zmqengine_http_request_seconds", "From a request's headers to the end of its answer.", ["path"],
            buckets=(0.001, 0.005, 0.025, 0.1, 0.25, 1, 2.5, 10, 25, 100, 250), registry=self.registry,
        )  # fmt: skip
        self._running = Gauge(
            "zmqengine_http_requests_running",
            "HTTP requests being answered.",
            ["path"],
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        # The library looks one up under a lock, which takes longer than to count. There are few: paths and statuses.
        self._requests_of = functools.cache(self._requests.labels)
        self._seconds_at = functools.cache(self._seconds.labels)
        self._running_at = functools.cache(self._running.labels)
        self._head_changes = Counter(
            "zmqengine_http_head_changes",
            "What agents changed in the heads of their prompts, and was undone.",
            ["kind"],
            registry=self.registry,
        )

    def told(self) -> bytes:
        """What was counted, by all processes of this front-end, in Prometheus's text format."""
        if COUNTS_DIRECTORY not in os.environ:
            return generate_latest(self.registry)
        for _ in range(_READS_MAX - 1):
            # One that has just been started makes its files, and has written nothing to them yet.
            with contextlib.suppress(struct.error):
                return self._told_by_all()
        return self._told_by_all()

    @staticmethod
    def _told_by_all() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def head_changed(self, kind: str, count: int) -> None:
        """So many changes of a kind were undone."""
        self._head_changes.labels(kind).inc(count)

    def began(self, path: str) -> None:
        """A request for the endpoint at `path`, which is not what a client typed: those have no bound."""
        self._running_at(path).inc()

    def ended(self, path: str, status: int, seconds: float) -> None:
        """It was answered, or its client left: status 0."""
        self._running_at(path).dec()
        self._requests_of(path, str(status)).inc()
        self._seconds_at(path).observe(seconds)


def forget_running(pid: int | None) -> None:
    """A process has ended: what it was answering is answered no more, and what it has counted stays."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
