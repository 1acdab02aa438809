"""Prometheus metrics of this front-end's own requests."""

from __future__ import annotations

import contextlib
import functools
import os
import struct

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

COUNTS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's environment variable for the directory in which several processes share their counts.
It must be set before they start."""


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
        # `labels` takes a lock, which costs more than the count itself. Paths and statuses are few, so cache
        # them.
        self._requests_of = functools.cache(self._requests.labels)
        self._seconds_at = functools.cache(self._seconds.labels)
        self._running_at = functools.cache(self._running.labels)
        self._head_changes = Counter(
            "zmqengine_http_head_changes",
            "What agents changed in the heads of their prompts, and was undone.",
            ["kind"],
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """The counts of all processes of this front-end in Prometheus's text format."""
        if COUNTS_DIRECTORY not in os.environ:
            return generate_latest(self.registry)
        for _ in range(_READS_MAX - 1):
            # A process that has just started has created its files but not yet written to them.
            with contextlib.suppress(struct.error):
                return self._all_processes()
        return self._all_processes()

    @staticmethod
    def _all_processes() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def head_changed(self, kind: str, count: int) -> None:
        """Count `count` undone head changes of a kind."""
        self._head_changes.labels(kind).inc(count)

    def began(self, path: str) -> None:
        """Count a running request; `path` is that of the endpoint, since the paths that clients send are
        unbounded."""
        self._running_at(path).inc()

    def ended(self, path: str, status: int, seconds: float) -> None:
        """Count a finished request; status 0 if the client disconnected before the response."""
        self._running_at(path).dec()
        self._requests_of(path, str(status)).inc()
        self._seconds_at(path).observe(seconds)


def forget_running(pid: int | None) -> None:
    """Drop the running requests of a process that has ended; its counters stay."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
