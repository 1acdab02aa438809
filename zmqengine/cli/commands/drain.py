"""`zmqengine drain`: the graceful shutdown of a worker."""

from __future__ import annotations

import click

from zmqengine.cli.connection import connect
from zmqengine.cli.flags import WorkerTarget, worker_options


@click.command()
@worker_options
def drain(target: WorkerTarget) -> None:
    """Let a worker finish its running requests, reject new ones, and exit with 0."""
    with connect(target, name="drain") as client:
        client.drain()
    click.echo("draining: the worker exits once its requests have finished", err=True)
