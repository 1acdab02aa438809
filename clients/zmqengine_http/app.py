"""The ASGI application: routes, access checks, request bodies, errors, and one log line per request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from zmqengine.paths import state_directory
from zmqengine_client import AsyncClient, ClientEvent, load_keys
from zmqengine_client.errors import Overloaded, ShutDown, ZmqEngineError
from zmqengine_http.answers.respond import COMMENT
from zmqengine_http.batches.runner import Batches
from zmqengine_http.config import HttpConfig
from zmqengine_http.endpoint import Endpoint, Service
from zmqengine_http.endpoints import ENDPOINTS, error_shape_at
from zmqengine_http.prompt.prompts import Tokenizing
from zmqengine_http.serving import logs
from zmqengine_http.serving.access import Access
from zmqengine_http.serving.body import json_object
from zmqengine_http.serving.body_room import BODIES_MAX, BodyRoom
from zmqengine_http.serving.errors import ApiError, ErrorShape, from_engine
from zmqengine_http.serving.exchange import Disconnected, Exchange, Receive, Scope, Send
from zmqengine_http.serving.fetching import ImageFetching
from zmqengine_http.serving.meter import Meter
from zmqengine_http.serving.tracing import open_traces
from zmqengine_http.stable_head import AnswerMemory, StableHead
from zmqengine_http.workers.launched import (
    AZURE_PATH,
    ONLY_KEY,
    ONLY_PATH,
    LaunchedModels,
    keep_alive_of,
    of_one_model,
)
from zmqengine_http.workers.pool import Pool
from zmqengine_http.workers.worker import Connect, PooledWorker

EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-ignored-fields",
    "x-unenforced-keywords",
)
"""Response headers exposed to pages of other origins: request ids to log, and retry advice."""
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
AUDIO_HINT = ": no model here reads or writes sound; whisper.cpp and mlx-audio are servers with this endpoint"
READY_WAIT_S = 5.0
"""Longest wait of one of several processes for a worker before it accepts connections."""


class HttpApp:
    """An ASGI application that stays connected to its workers from start-up to shutdown.

    `service` is the state that its endpoints share. `connect` makes the client for an address; by default an
    `AsyncClient` with the keys of the configuration. Raises `ConfigError` for keys that cannot be read.
    """

    def __init__(self, config: HttpConfig, connect: Connect | None = None) -> None:
        make = connect or connector_of(config)
        workers = [PooledWorker(address, make, config.probe_ms) for address in dict.fromkeys(config.workers)]
        if config.serve:
            workers = []
        pool = Pool(workers, config.aliases)
        launched = None
        if config.serve:
            launched = LaunchedModels(pool, make, probe_ms=config.probe_ms, wait_ms=config.load_wait_ms)
        self.service = Service(
            config,
            pool,
            Tokenizing(config.tokenize_threads),
            BodyRoom(BODIES_MAX * config.body_bytes_max),
            StableHead(AnswerMemory(), enabled=config.stable_head),
            Meter(),
            open_traces(config.tracing),
            launched,
            ImageFetching() if config.image_urls else None,
            Batches(state_directory(), self._route),
        )
        by_path: dict[str, list[Endpoint]] = {}
        for endpoint in ENDPOINTS:
            by_path.setdefault(endpoint.path, []).append(endpoint)
        handled = {path: _at_path(self.service, endpoints) for path, endpoints in by_path.items()}
        self._plain = {path: each for path, each in handled.items() if "{" not in path}
        # A bare router: the middleware of a Starlette application would add a call per token.
        routes = [Route(path, each) for path, each in handled.items()]
        self._router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        self._router.default = _Handled(self.service, Endpoint("", "", _not_found, "", open=True), "")
        self._app: ASGIApp = self._route
        if config.cors_origins:
            self._app = CORSMiddleware(
                self._route,
                allow_origins=config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: a request, a websocket or the lifespan."""
        await self._app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Paths without parameters skip the router, which handles everything else: parameters, mounts, the
        # lifespan.
        if scope["type"] == "http" and scope["path"].startswith((ONLY_PATH, AZURE_PATH)):
            scope = of_one_model(scope)
        direct = scope["type"] == "http" and not scope.get("root_path")
        plain = self._plain.get(scope["path"]) if direct else None
        await (plain or self._router)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        launched = self.service.launched
        runs = [worker.run() for worker in self.service.pool.workers]
        following = [asyncio.create_task(run) for run in (runs if launched is None else [launched.run()])]
        try:
            if self.service.config.processes > 1:
                await self._wait_ready()
            if self.service.batches is not None:
                self.service.batches.resume()
            yield
        finally:
            if self.service.batches is not None:
                await self.service.batches.close()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            self.service.tokenizing.close()
            if self.service.fetching is not None:
                self.service.fetching.close()
            if self.service.traces is not None:
                self.service.traces.close()

    async def _wait_ready(self) -> None:
        """Wait a while for a worker: the other processes may serve already, so waiting beats a refusal."""
        until = time.monotonic() + READY_WAIT_S
        while (
            not (self.service.pool.ready or (self.service.launched and self.service.launched.entries))
            and time.monotonic() < until
        ):
            await asyncio.sleep(0.01)


def connector_of(config: HttpConfig) -> Connect:
    """A function that makes the client for an address. Raises `ConfigError` for keys that cannot be read."""
    keys = None
    if config.client_key is not None and config.server_key is not None:
        keys = load_keys(config.client_key, config.server_key)

    def connect(address: str, on_event: Callable[[ClientEvent], None]) -> AsyncClient:
        return AsyncClient(address, name="zmqengine http", keys=keys, on_event=on_event)

    return connect


async def _not_found(service: Service, exchange: Exchange) -> None:
    path = exchange.scope["path"]
    hint = AUDIO_HINT if path.startswith("/v1/audio/") else ""
    raise ApiError(404, f"there is no endpoint {path[:200]}{hint}", code="unknown_url")


class ModelWait:
    """Keeps a stream open while its model loads: an SSE comment after each silence of `keepalive_ms`."""

    def __init__(self, exchange: Exchange, keepalive_ms: int) -> None:
        self._exchange = exchange
        self._keepalive_s = keepalive_ms / 1000
        self._written_s = time.monotonic()

    async def stream(self) -> None:
        """Send a comment if one is due. Its status cannot be taken back: a later refusal is an event."""
        exchange = self._exchange
        if time.monotonic() < self._written_s + self._keepalive_s or exchange.scope["http_version"] == "1.0":
            return
        if not exchange.started:
            exchange.waited = True
            await exchange.start(200, exchange.stream_headers)
        await exchange.write(COMMENT)
        self._written_s = time.monotonic()

    async def nothing(self) -> None:
        """A response that is no stream cannot begin before it is complete."""


def _at_path(service: Service, endpoints: Sequence[Endpoint]) -> ASGIApp:
    """The endpoints of one path as an ASGI application."""
    allowed = ", ".join(endpoint.method for endpoint in endpoints)
    handled = {endpoint.method: _Handled(service, endpoint, allowed) for endpoint in endpoints}
    return _ByMethod(handled) if len(handled) > 1 else next(iter(handled.values()))


class _ByMethod:
    """Endpoints of one path by method; the first refuses what none of them takes."""

    def __init__(self, handled: Mapping[str, _Handled]) -> None:
        self._handled = handled
        self._first = next(iter(handled.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handled.get(scope.get("method", ""), self._first)(scope, receive, send)


class _Handled:
    """An endpoint as an ASGI application: access checks, the body, errors as responses, metrics, the log
    line."""

    def __init__(self, service: Service, endpoint: Endpoint, allowed: str) -> None:
        self._service = service
        self._endpoint = endpoint
        self._allowed = allowed
        self._access = Access(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # A websocket to one of our paths is refused before it opens.
            await send({"type": "websocket.close", "code": 1000})
            return
        exchange = Exchange(scope, receive, send)
        shape = self._endpoint.error_shape if self._endpoint.path else error_shape_at(scope["path"])
        started = time.monotonic()
        self._service.meter.began(self._endpoint.path)
        try:
            self._access.check(
                exchange, open_to_all=self._endpoint.open, takes_body=self._endpoint.body is not None
            )
            self._check_method(scope["method"])
            await self._answer(exchange)
        except Disconnected:
            exchange.facts["disconnected"] = True
        except ZmqEngineError as error:
            await _refuse(exchange, self._known(from_engine(error)), shape)
        except ApiError as error:
            await _refuse(exchange, self._known(error), shape)
        except RecursionError:
            # Only what a client nests is deep; no function here is recursive otherwise.
            refusal = ApiError(400, "the request is nested too deep", code="invalid_value")
            await _refuse(exchange, refusal, shape)
        except asyncio.CancelledError:
            # The server ends, and this task with it: raised further it would be a traceback in the log.
            await _refuse(exchange, self._known(from_engine(ShutDown("the server is shutting down"))), shape)
        except Exception as error:  # noqa: BLE001 - the edge: one failure becomes one response
            logs.logger.error("request failed", exc_info=error, extra={"fields": {"id": exchange.id}})
            failure = ApiError(500, "internal error", kind="server_error", code="internal_error")
            await _refuse(exchange, failure, shape)
        finally:
            self._service.bodies.held -= exchange.body_bytes
            seconds = time.monotonic() - started
            self._service.meter.ended(self._endpoint.path, exchange.status, seconds)
            if self._service.traces is not None:
                self._service.traces.record(exchange, self._endpoint.path, seconds)
            self._log(exchange, seconds)

    async def _answer(self, exchange: Exchange) -> None:
        endpoint, config = self._endpoint, self._service.config
        if endpoint.body is None:
            await endpoint.answer(self._service, exchange)
            return
        try:
            data = await exchange.read_body(config.body_bytes_max, self._service.bodies)
        except (Overloaded, ApiError):
            # Twice the bound: a body somewhat over it is refused before any of it is read.
            await exchange.discard_body(2 * config.body_bytes_max)
            raise
        document = json_object(data)
        del data
        if ONLY_KEY in exchange.scope and endpoint.needs_model:
            document.setdefault("model", exchange.scope[ONLY_KEY].replace("--", "/"))
        if self._service.launched is not None and endpoint.needs_model:
            exchange.keep_alive_s = keep_alive_of(document)
        read = endpoint.body.read_document(document, ignore_unknown=config.unknown_fields == "ignore")
        del document
        exchange.note_ignored(read.ignored, read.unknown_inside)
        if config.log_prompts and read.ignored:
            exchange.facts["ignored_fields"] = list(read.ignored)
        await exchange.unless_gone(self._answer_with_model(exchange, read.request))
        # Requests that came together end together. Metrics and the log line wait until the last of them has
        # ended: one kind of work after the other takes half the time of both in turn.
        await asyncio.sleep(0)

    async def _answer_with_model(self, exchange: Exchange, request: Any) -> None:
        """Answer once the request's model is loaded, where a launcher loads it."""
        service, endpoint = self._service, self._endpoint
        if service.launched is None or not endpoint.needs_model or getattr(request, "only_loads", False):
            await endpoint.answer(service, exchange, request)
            return
        keepalive = ModelWait(exchange, service.config.keepalive_ms)
        streams = endpoint.streams and getattr(request, "stream", False)
        wait = keepalive.stream if streams else keepalive.nothing
        keep_alive_s = exchange.keep_alive_s
        if keep_alive_s is not None and exchange.operates is False:
            exchange.note_ignored(["keep_alive"], 0)
            keep_alive_s = None
        async with service.launched.held(request.model, keep_alive_s, wait):
            await endpoint.answer(service, exchange, request)

    def _known(self, error: ApiError) -> ApiError:
        """The error with the status that the clients of this API know."""
        if error.status == 503 and not error.final:
            error.status = self._endpoint.busy_status
        return error

    def _log(self, exchange: Exchange, seconds: float) -> None:
        # The endpoint and no path: a caller writes into paths what it likes, and into the method.
        path, method = self._endpoint.path or "unknown", exchange.scope["method"]
        quiet = path in ("/health", "/ready", "/metrics", "/status")
        logs.log(
            logging.DEBUG if quiet else logging.INFO, "request",
            id=exchange.id, method=method if method in METHODS else "unknown", path=path, status=exchange.status,
            ms=round(seconds * 1000, 1), **exchange.facts,
        )  # fmt: skip

    def _check_method(self, method: str) -> None:
        allowed = self._endpoint.method
        if allowed and method != allowed and not (method == "HEAD" and allowed == "GET"):
            raise ApiError(
                405,
                f"{self._endpoint.path} takes {self._allowed}",
                code="method_not_allowed",
                allow=self._allowed,
            )


async def _refuse(exchange: Exchange, error: ApiError, shape: ErrorShape) -> None:
    exchange.facts["error"] = error.code
    if not exchange.started:
        await exchange.send(error.status, error.headers(), shape(error, exchange.id))
    elif exchange.waited:
        # The status is out already, with the keep-alives of the wait for its model.
        await exchange.write(b"event: error\ndata: " + shape(error, exchange.id) + b"\n\n", last=True)
