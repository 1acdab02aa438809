"""One adapter from its start to its end."""

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
    """Serve until SIGINT, SIGTERM or `stopping`; what runs may finish, unless the signal comes a second time.

    Raises `ConfigError` if it cannot begin.
    """
    stopping = stopping or asyncio.Event()
    upstream = Upstream(config.worker, config.keys, patience_s=config.patience_s)
    following = asyncio.create_task(upstream.run())
    serving = asyncio.create_task(_serve(config, upstream, stopping))
    tasks = [following, serving, asyncio.create_task(_write_tokenizer(config, upstream))]
    _on_signals(stopping, serving)
    try:
        # Following the worker ends only by failing.
        await asyncio.wait((following, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in (following, serving):
        # A second signal cancels serving: that is no failure.
        if not task.cancelled():
            task.result()


async def _serve(config: SmgConfig, upstream: Upstream, stopping: asyncio.Event) -> None:
    # Each wire imports what it needs: the ZeroMQ wire works without gRPC.
    if config.listen is not None:
        from zmqengine_smg.grpc_server import serve_grpc

        await serve_grpc(config, upstream, stopping)
    else:
        from zmqengine_smg.engine import serve_engine

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

    # In a thread of a program that has signal handlers of its own there are none to set.
    with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
