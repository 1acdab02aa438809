"""The life of one adapter: start, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from zmqengine_client.errors import ZmqEngineError
from zmqengine_smg.config import SmgConfig
from zmqengine_smg.tokenizer_files import write_tokenizer
from zmqengine_smg.upstream import Upstream

log = logging.getLogger("zmqengine.smg")


async def run(config: SmgConfig, stopping: asyncio.Event | None = None) -> None:
    """Serve until SIGINT, SIGTERM or `stopping`, then drain; a second signal ends at once.

    Raises `ConfigError` if the adapter cannot start.
    """
    stopping = stopping or asyncio.Event()
    upstream = Upstream(config.worker, config.keys, patience_s=config.patience_s)
    following = asyncio.create_task(upstream.run())
    serving = asyncio.create_task(_serve(config, upstream, stopping))
    tasks = [following, serving, asyncio.create_task(_write_tokenizer(config, upstream))]
    _on_signals(stopping, serving)
    try:
        # Following the worker ends only with an error.
        await asyncio.wait((following, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in (following, serving):
        # A second signal cancels serving, which is no error.
        if not task.cancelled():
            task.result()


async def _serve(config: SmgConfig, upstream: Upstream, stopping: asyncio.Event) -> None:
    # Imported here so that the ZeroMQ wire works without gRPC installed.
    if config.listen is not None:
        from zmqengine_smg.grpc_server import serve_grpc

        await serve_grpc(config, upstream, stopping)
    else:
        from zmqengine_smg.zmq_server import serve_engine

        await serve_engine(config, upstream, stopping)


async def _write_tokenizer(config: SmgConfig, upstream: Upstream) -> None:
    if config.tokenizer_directory is None:
        return
    await upstream.wait_for(lambda: upstream.model is not None)
    assert upstream.model is not None
    try:
        await asyncio.to_thread(write_tokenizer, upstream.model, config.tokenizer_directory)
        log.info("the tokenizer is in %s", config.tokenizer_directory)
    except (OSError, ZmqEngineError) as error:
        log.error("cannot write the tokenizer to %s: %s", config.tokenizer_directory, error)


def _on_signals(stopping: asyncio.Event, serving: asyncio.Task[None]) -> None:
    def stop() -> None:
        if stopping.is_set():
            serving.cancel()
        stopping.set()

    # In a thread, or in a program with signal handlers of its own, none can be set.
    with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
