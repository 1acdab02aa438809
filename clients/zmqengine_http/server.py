"""Serves the application with uvicorn until a signal."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn

from zmqengine.protocol.addresses import is_loopback_host
from zmqengine_client.errors import ConfigError, ShutDown
from zmqengine_http.app import HttpApp, connector_of
from zmqengine_http.config import HttpConfig
from zmqengine_http.processes import run_processes
from zmqengine_http.serving import logs
from zmqengine_http.serving.http_protocol import protocol_class

KEEP_ALIVE_S = 75
"""Longer than usual clients pool a connection, so that the client closes it and not we, under a new
request."""
LOOK_S = 0.1
"""Interval at which the end looks for a second signal, as uvicorn does."""
END_S = 1
"""Time that the last events have to leave."""
COLLECT_AFTER = 20_000
"""Generation-0 threshold of the garbage collector.

Reference counting frees what requests leave behind; at Python's default of 700 (2,000 from 3.13 on) the
collector takes a tenth of a request's time.
"""


def serve(config: HttpConfig) -> int:
    """Listen, serve until SIGINT or SIGTERM, drain; returns the exit code.

    Raises `ConfigError` if the address cannot be bound.
    """
    logs.configure(config)
    # Raises for unreadable keys here, once, before any processes start.
    connector_of(config)
    listener = _bind(config)
    host, port = listener.getsockname()[:2]
    if not config.keys and not is_loopback_host(host):
        if not config.insecure_no_key:
            raise ConfigError(
                f"{config.host} is open to the network and no API key is asked for: give --api-key or "
                "$ZMQENGINE_HTTP_API_KEYS, or --insecure-no-key if every peer that reaches this port may use it"
            )
        logs.warning("open to the network without an API key", host=host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logs.info("listening", url=url, workers=list(config.workers))
    if sys.stderr.isatty():
        logs.info(f"a browser may open {url}; programs: {url}/v1, or `zmqengine launch`")
    return run(config, listener) if config.processes == 1 else run_processes(config, listener, run)


def run(config: HttpConfig, listener: socket.socket) -> int:
    """Serve on a bound socket, in this process, until a signal; returns the exit code."""
    server = _Server(HttpApp(config), config)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn sets the same handler, but only once its loop runs: a signal before that must not be lost.
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def uvicorn_config(app: HttpApp, config: HttpConfig) -> uvicorn.Config:
    """The uvicorn configuration of the application."""
    return uvicorn.Config(
        app,
        loop="auto",  # uvloop where it is installed, which the http extra sees to.
        http=protocol_class(config),
        ws="none",
        lifespan="on",
        backlog=config.backlog,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.drain_ms // 1000 + END_S,
    )


class _Server(uvicorn.Server):
    def __init__(self, app: HttpApp, config: HttpConfig) -> None:
        super().__init__(uvicorn_config(app, config))
        self._service = app.service
        self._drain_s = config.drain_ms / 1000
        self._at_once = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and move all live objects to the permanent generation, so that a full collection skips
        them."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at once at the second."""
        self._at_once = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain. Requests that run at the end of the drain time or at the second signal end with the error of their
        API."""
        draining = asyncio.create_task(super().shutdown(sockets))
        until_s = time.monotonic() + self._drain_s
        while not (draining.done() or self._at_once or time.monotonic() >= until_s):
            await asyncio.wait((draining,), timeout=LOOK_S)
        if not draining.done():
            for worker in self._service.pool.workers:
                if worker.connected is not None:
                    worker.connected.fail(ShutDown("the server is shutting down"))
            await asyncio.wait((draining,), timeout=END_S)
        if draining.done():
            return draining.result()
        # Requests that wait for no worker, and streams that no client reads.
        for task in list(self.server_state.tasks):
            task.cancel()
        draining.cancel()
        await asyncio.wait((draining,))
        await self.lifespan.shutdown()


def _bind(config: HttpConfig) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(config.backlog)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
        ) from None
    listener.set_inheritable(True)
    return listener
