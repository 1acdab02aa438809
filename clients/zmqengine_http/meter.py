"""Counts of this front-end's own requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Meter:
    """Counts the requests of one front-end."""

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
        )

        self._head_changes = Counter(
            "zmqengine_http_head_changes",
            "What agents changed in the heads of their prompts, and was undone.",
            ["kind"],
            registry=self.registry,
        )

    def head_changed(self, kind: str, count: int) -> None:
        """So many changes of a kind were undone."""
        self._head_changes.labels(kind).inc(count)

    def began(self, path: str) -> None:
        """A request for the endpoint at `path`, which is not what a client typed: those have no bound."""
        self._running.labels(path).inc()

    def ended(self, path: str, status: int, seconds: float) -> None:
        """It was answered, or its client left: status 0."""
        self._running.labels(path).dec()
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
