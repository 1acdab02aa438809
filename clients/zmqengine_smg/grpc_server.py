"""The gRPC server around the MLX engine service: its socket, its start, its orderly end."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from zmqengine_client.errors import ConfigError
from zmqengine_smg.config import SmgConfig
from zmqengine_smg.grpc_readiness import Readiness
from zmqengine_smg.grpc_service import MlxEngineService
from zmqengine_smg.upstream import Upstream

log = logging.getLogger("zmqengine.smg")

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # A second server on the port must fail, not share its calls.
    ("grpc.so_reuseport", 0),
    # The gateway pings every 30 s, also without calls; by default that counts as abuse and ends the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


async def serve_grpc(config: SmgConfig, upstream: Upstream, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then let running calls finish for up to `drain_s`.

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
    await readiness.tell()
    await server.start()
    log.info("listening on %s:%d", host, bound)
    telling = asyncio.create_task(readiness.follow(upstream))
    try:
        await stopping.wait()
        service.draining = True
        await readiness.tell()
    finally:
        telling.cancel()
        await server.stop(config.drain_s)
