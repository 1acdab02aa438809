"""The gRPC server around the MLX engine service: its socket, the health service, start and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from zmqengine_client.errors import ConfigError
from zmqengine_smg.config import SmgConfig
from zmqengine_smg.grpc_service import MlxEngineService
from zmqengine_smg.upstream import Upstream

log = logging.getLogger("zmqengine.smg")

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # A second server on the port must fail, not share its calls.
    ("grpc.so_reuseport", 0),
    # The gateway pings every 30 s, also without calls; by default that counts as abuse and ends the
    # connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
SERVICES = ("", "mlx.grpc.engine.MlxEngine")


async def serve_grpc(config: SmgConfig, upstream: Upstream, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then drain: running calls may go on for up to `drain_s`.

    Raises `ConfigError` if the address cannot be bound.
    """
    server = grpc.aio.server(options=_OPTIONS)
    service = MlxEngineService(upstream)
    mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    readiness = Readiness(server, lambda: service.healthy)
    host, port = config.listen_address
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    await readiness.update()
    await server.start()
    log.info("listening on %s:%d", host, bound)
    following = asyncio.create_task(readiness.follow(upstream))
    try:
        await stopping.wait()
        service.draining = True
        await readiness.update()
    finally:
        following.cancel()
        await server.stop(config.drain_s)


class Readiness:
    """gRPC's standard health service, `grpc.health.v1.Health`, on a server that has not started.

    `healthy` returns whether the worker takes requests.
    """

    def __init__(self, server: grpc.aio.Server, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    async def update(self) -> None:
        """Publish the present status, to watchers too."""
        status = health_pb2.HealthCheckResponse.SERVING
        if not self._healthy():
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in SERVICES:
            await self._servicer.set(name, status)

    async def follow(self, upstream: Upstream) -> None:
        """Publish the status with every change of the worker's state, until cancelled."""
        while True:
            state = upstream.state
            await self.update()
            await upstream.wait_for(lambda: upstream.state != state)  # noqa: B023 - awaited before it changes
