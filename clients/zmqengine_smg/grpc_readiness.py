"""gRPC's standard health service, which says whether the worker takes requests."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from zmqengine_smg.upstream import Upstream

SERVICES = ("", "mlx.grpc.engine.MlxEngine")


class Readiness:
    """`grpc.health.v1.Health` on a server that has not started; `healthy` is asked whenever something changed."""

    def __init__(self, server: grpc.aio.Server, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    async def tell(self) -> None:
        """Say how it is now, also to those who watch."""
        status = health_pb2.HealthCheckResponse.SERVING
        if not self._healthy():
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in SERVICES:
            await self._servicer.set(name, status)

    async def follow(self, upstream: Upstream) -> None:
        """Say it again with every change of the worker's state, until it is cancelled."""
        while True:
            state = upstream.state
            await self.tell()
            await upstream.wait_for(lambda: upstream.state != state)  # noqa: B023 - awaited before it changes
