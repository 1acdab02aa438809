"""A worker as the engine at the other end of the gateway's direct ZeroMQ wire: connect, serve, drain,
reconnect."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import zmq.asyncio

from zmqengine_smg.config import SmgConfig
from zmqengine_smg.upstream import Upstream
from zmqengine_smg.zmq_connection import EngineConnection
from zmqengine_smg.zmq_link import EngineLink, HandshakeFailed, dial
from zmqengine_smg.zmq_messages import Registration

log = logging.getLogger("zmqengine.smg")

REDIAL_S = 0.5
DRAIN_POLL_S = 0.05


async def serve_engine(config: SmgConfig, upstream: Upstream, stopping: asyncio.Event) -> None:
    """Connect to the gateway whenever the worker is ready, again after either is lost, until `stopping` is set.

    Then drain: running requests may go on for up to `drain_s`.
    """
    assert config.engine is not None
    context = zmq.asyncio.Context()
    try:
        while not stopping.is_set():
            link = await _unless_stopping(_connect(context, config.engine, upstream), stopping)
            if link is None:
                return
            try:
                await _serve(EngineConnection(link, upstream), link, config, upstream, stopping)
            finally:
                link.close()
    finally:
        context.destroy()


async def _connect(context: zmq.asyncio.Context, address: str, upstream: Upstream) -> EngineLink:
    await upstream.wait_for(lambda: upstream.ready)
    log.info("waiting for the gateway of %s", address)
    while True:
        try:
            link = await dial(context, address.removeprefix("ipc://"), lambda: _registration(upstream))
        except HandshakeFailed as error:
            log.warning("%s: trying again", error.message)
            await asyncio.sleep(REDIAL_S)
        else:
            log.info("connected to the gateway of %s", address)
            return link


async def _serve(
    connection: EngineConnection,
    link: EngineLink,
    config: SmgConfig,
    upstream: Upstream,
    stopping: asyncio.Event,
) -> None:
    serving = asyncio.create_task(connection.run())
    endings = {
        serving,
        gateway_gone := asyncio.create_task(link.gone.wait()),
        worker_gone := asyncio.create_task(_worker_gone(connection, upstream, config.patience_s)),
        stop := asyncio.create_task(stopping.wait()),
    }
    try:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            connection.draining = True
            await _drained(connection, link, config.drain_s)
        if gateway_gone.done():
            log.warning("lost the gateway")
        else:
            link.send_dead()
        if worker_gone.done():
            log.warning("lost the worker: reported to the gateway")
        if serving.done():
            serving.result()
    finally:
        for task in endings:
            task.cancel()
        await asyncio.gather(*endings, return_exceptions=True)
        connection.close()


async def _worker_gone(connection: EngineConnection, upstream: Upstream, patience_s: float) -> None:
    """Return once the worker counts as lost: unready for `patience_s`, or draining or failed with nothing running.

    A worker that returns earlier keeps its requests, so its loss is not reported to the gateway.
    """
    while True:
        await upstream.wait_for(lambda: not upstream.ready)
        while not upstream.ready:
            ending = upstream.state in ("draining", "failed") and not connection.running
            if ending or time.monotonic() - upstream.state_since >= patience_s:
                return
            await asyncio.sleep(DRAIN_POLL_S)


async def _drained(connection: EngineConnection, link: EngineLink, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while connection.running and not link.gone.is_set() and time.monotonic() < until:
        await asyncio.sleep(DRAIN_POLL_S)


async def _unless_stopping(connecting: object, stopping: asyncio.Event) -> EngineLink | None:
    task = asyncio.ensure_future(connecting)  # type: ignore[call-overload]
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stop.cancel()
        task.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def _registration(upstream: Upstream) -> Registration:
    assert upstream.model is not None
    limits = upstream.model.limits
    return Registration(
        max_model_len=limits.context_tokens_max,
        max_num_seqs=limits.requests_per_session_max,
        instance_id=secrets.token_hex(8),
    )
