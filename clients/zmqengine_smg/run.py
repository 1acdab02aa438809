"""The life of one adapter: start, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from zmqengine_smg.config import SmgConfig
from zmqengine_smg.grpc_server import serve_grpc
from zmqengine_smg.upstream import Upstream


async def run(config: SmgConfig, stopping: asyncio.Event | None = None) -> None:
    """Serve until SIGINT, SIGTERM or `stopping`, then drain; a second signal ends at once.

    Raises `ConfigError` if the adapter cannot start.
    """
    stopping = stopping or asyncio.Event()
    upstream = Upstream(config.worker, config.keys, patience_s=config.patience_s)
    following = asyncio.create_task(upstream.run())
    serving = asyncio.create_task(serve_grpc(config, upstream, stopping))
    _on_signals(stopping, serving)
    try:
        # Following the worker ends only with an error.
        await asyncio.wait((following, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (following, serving):
            task.cancel()
        await asyncio.gather(following, serving, return_exceptions=True)
    for task in (following, serving):
        # A second signal cancels serving, which is no error.
        if not task.cancelled():
            task.result()


def _on_signals(stopping: asyncio.Event, serving: asyncio.Task[None]) -> None:
    def stop() -> None:
        if stopping.is_set():
            serving.cancel()
        stopping.set()

    # In a thread, or in a program with signal handlers of its own, none can be set.
    with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
