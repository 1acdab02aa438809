"""A Prometheus exporter: `/metrics` on a port of its own, for workers without an HTTP front-end."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.addresses import is_loopback_host
from zmqengine.protocol.launcher import ModelList
from zmqengine_client import Client
from zmqengine_client.errors import ConfigError
from zmqengine_metrics.families import families, model_families
from zmqengine_metrics.snapshot import Snapshot

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class WorkersCollector(Collector):
    """Queries the workers at each scrape. A worker that does not answer in time has only `zmqengine_up` 0.

    `models` asks a launcher for its list; None where there is none. Of its models only those are queried that have a
    worker.
    """

    def __init__(
        self, clients: Sequence[tuple[str, Client]], models: Callable[[], ModelList | None] | None = None
    ) -> None:
        self._clients = list(clients)
        self._list = models
        self._models: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        listed = self._list() if self._list is not None else None
        asleep = () if listed is None else {entry.name for entry in listed.models if entry.pid is None}
        yield from families(
            [self._read(worker, client) for worker, client in self._clients if worker not in asleep]
        )
        if listed is not None:
            yield from model_families(listed.models)

    def _read(self, worker: str, client: Client) -> Snapshot:
        before = self._models.get(worker, "")
        try:
            snapshot = Snapshot(worker, client.describe(), client.status(), before)
        except ZmqEngineError:
            return Snapshot(worker, model_before=before)
        self._models[worker] = snapshot.model
        return snapshot


class Exporter:
    """An HTTP server for scrapers, which listens from construction until `close`.

    With a `key`, scrapers must send it as a bearer token. Raises `ConfigError` for an address that cannot be
    bound, or that other machines can reach without a key.
    """

    def __init__(self, collector: Collector, host: str, port: int, *, key: str | None = None) -> None:
        if key is None and not is_loopback_host(host):
            raise ConfigError(
                f"{host}:{port} can be reached from other machines: give --key or $ZMQENGINE_METRICS_KEY, "
                "or listen on 127.0.0.1"
            )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._app = make_wsgi_app(registry)
        self._expected = None if key is None else f"Bearer {key}".encode()
        try:
            self._server = make_server(host, port, self._answer, _ThreadingServer, _Quiet)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until `close`."""
        self._thread.join()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        authorization = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(authorization, self._expected):
            return _refuse(start, "401 Unauthorized", b"a key is needed: Authorization: Bearer KEY\n")
        if environ.get("PATH_INFO") != "/metrics":
            return _refuse(start, "404 Not Found", b"the metrics are at /metrics\n")
        answer: Iterable[bytes] = self._app(environ, start)
        return answer


def _refuse(start: StartResponse, status: str, body: bytes) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    # One thread per request, so that a slow scraper does not delay others.
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 30

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: scrapes come every few seconds."""
