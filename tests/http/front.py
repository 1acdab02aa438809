"""The front-end on a free port of this process, for tests that speak HTTP to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import uvicorn

from zmqengine_http import HttpApp, HttpConfig
from zmqengine_http.endpoint import Service
from zmqengine_http.server import uvicorn_config

WAIT_S = 60.0


class Front(NamedTuple):
    """A running front-end: where it is, and what is inside."""

    url: str
    service: Service
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rsplit(":", 1)[1])


@contextlib.contextmanager
def serving(
    config: HttpConfig, connect: Callable[..., Any] | None = None, *, ready: bool = True
) -> Iterator[Front]:
    """A front-end that is up and, with `ready`, has a worker."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = HttpApp(config, connect)
    server = uvicorn.Server(uvicorn_config(app, dataclasses.replace(config, drain_ms=5000)))
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    wait_until(lambda: loops, "the event loop runs")
    front = Front(f"http://127.0.0.1:{listener.getsockname()[1]}", app.service, server, loops[0])
    try:
        wait_until(lambda: server.started, "the server is up")
        if ready:
            wait_until(lambda: front.service.pool.ready, "a worker is ready")
        yield front
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Return when the condition holds; an assertion if it does not in time."""
    until = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < until, f"waited {wait_s} s in vain: {what}"
        threading.Event().wait(0.01)


class Reply(NamedTuple):
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The document in the body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in the body, which has OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert self.headers["content-type"] == "application/json"
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended as it should."""
        assert self.status == 200, self.body
        *events, last = [
            part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part[:1] != ":"
        ][:-1]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


def call(
    front: Front, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
) -> Reply:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT_S)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def get(front: Front, path: str, **headers: str) -> Reply:
    """One GET."""
    return call(front, "GET", path, None, headers)


def post(front: Front, path: str, body: object, **headers: str) -> Reply:
    """One POST with a JSON body."""
    return call(
        front, "POST", path, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )


def send(front: Front, body: dict[str, object], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection on which the request has been sent."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=WAIT_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


def chat(text: str = "Hi", /, **fields: object) -> dict[str, object]:
    """The body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}
