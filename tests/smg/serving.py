"""An adapter in a thread of this process, for tests that speak to it as a gateway does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from tests.support.ports import free_port
from tests.support.workers import wait_until
from zmqengine_smg import SmgConfig, run

WAIT_S = 60.0


class Adapter:
    """A running adapter; `stop` is the first signal to it."""

    def __init__(self, config: SmgConfig) -> None:
        self.error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self._thread.start()
        assert self._started.wait(WAIT_S)

    def stop(self) -> None:
        """Ask it to end in good order."""
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the adapter does not end"

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def _run(self, config: SmgConfig) -> None:
        async def main() -> None:
            self._stopping = asyncio.Event()
            self._started.set()
            await run(config, self._stopping)
            assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left behind"

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(main())
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.error = error
        finally:
            self._started.set()
            self._loop.close()


@contextlib.contextmanager
def adapter(**options: Any) -> Iterator[Adapter]:
    """An adapter for as long as the block lasts."""
    running = Adapter(SmgConfig(**options))
    try:
        yield running
    finally:
        if not running.ended:
            running.stop()
        running.join()
    assert running.error is None, running.error


class Gateway:
    """A gRPC client as the gateway's is."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub: Any = mlx_engine_pb2_grpc.MlxEngineStub(self.channel)

    def wait_healthy(self) -> None:
        """Until the adapter says that requests are welcome."""
        wait_until(self.healthy, "the adapter is not healthy")

    def healthy(self) -> bool:
        """What the service says of itself; no for one that cannot be reached."""
        try:
            answer = self.stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(answer.healthy)

    def generate(
        self, prompt: list[int], *, stream: bool = False, request_id: str = "", **sampling: Any
    ) -> Any:
        """The call; `sampling` are fields of SamplingParams."""
        parameters = pb.SamplingParams(**({"max_tokens": 5, "temperature": 0.0, "seed": 0} | sampling))
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=parameters,
            stream=stream,
        )
        return self.stub.Generate(request, timeout=WAIT_S)


@contextlib.contextmanager
def serving(worker: str, **options: Any) -> Iterator[Gateway]:
    """A gRPC adapter on a free port and a client of it. Ready, unless `ready` is False."""
    ready = options.pop("ready", True)
    address = f"127.0.0.1:{free_port()}"
    with adapter(worker=worker, listen=address, **options) as running:
        gateway = Gateway(address)
        gateway.adapter = running  # type: ignore[attr-defined]
        if ready:
            gateway.wait_healthy()
        try:
            yield gateway
        finally:
            gateway.channel.close()
