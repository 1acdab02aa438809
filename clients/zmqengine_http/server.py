"""Runs the application in uvicorn until a signal."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from zmqengine_client.errors import ConfigError
from zmqengine_http import logs
from zmqengine_http.app import HttpApp
from zmqengine_http.config import HttpConfig


def serve(config: HttpConfig) -> int:
    """Listen, serve until SIGINT or SIGTERM, let running answers finish; returns the exit code.

    Raises `ConfigError` if the address cannot be bound.
    """
    logs.configure(config)
    app = HttpApp(config)
    listener = _bind(config)
    host, port = listener.getsockname()[:2]
    if not config.api_keys and not _is_loopback(host):
        logs.warning("open to the network without an API key", host=host)
    logs.info(
        "listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}", workers=list(config.workers)
    )
    server = _Server(
        uvicorn.Config(
            app,
            # uvloop and httptools where they are installed, which the http extra sees to.
            loop="auto",
            http="auto",
            ws="none",
            lifespan="on",
            backlog=config.backlog,
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, config.drain_ms // 1000),
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises the signal again when it has shut down; ending well is not to look like a death.
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running answers finish, the second ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _bind(config: HttpConfig) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
        ) from None
    listener.set_inheritable(True)
    return listener


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
