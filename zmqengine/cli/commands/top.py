"""`zmqengine top`: a live view of workers."""

from __future__ import annotations

import asyncio
import sys

import click

from zmqengine.cli.connection import keys_of, worker_addresses
from zmqengine.cli.flags import WorkerTarget, several_workers_options
from zmqengine.cli.quantities import Seconds


@click.command()
@several_workers_options
@click.option("--every", "every_s", type=Seconds(0.1, 60), default=1.0, show_default=True, metavar="SECONDS")
def top(addresses: tuple[str, ...], client_key: str | None, server_key: str | None, every_s: float) -> None:
    """Watch workers: running and waiting requests, rates, memory. Without --worker also all models of a launcher.

    s sorts, f shows front-ends, a ends the chosen request, d drains the chosen worker, q quits. Ending and draining
    need an operator's key where the worker has keys.
    """
    try:
        from zmqengine_top.app import Top
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[top]'") from None
    # Textual draws on standard error.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.ClickException("this is not a terminal: `zmqengine status` prints the same once")
    from zmqengine_client import AsyncClient
    from zmqengine_client.launcher import AsyncLauncher

    keys = keys_of(WorkerTarget(None, client_key, server_key))
    watched = worker_addresses(addresses)

    async def watch() -> None:
        clients = [
            (
                name,
                AsyncClient(address, name="top", keys=keys, connect_timeout_s=2.0, answer_timeout_s=2.0),
            )
            for name, address in watched
        ]
        async with AsyncLauncher() as launcher:
            try:
                await Top(clients, every_s=every_s, launcher=None if addresses else launcher).run_async()
            finally:
                await asyncio.gather(*(client.close() for _, client in clients))

    asyncio.run(watch())
