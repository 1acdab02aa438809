"""`zmqengine drain`: a worker's orderly end."""

from __future__ import annotations

import click

from zmqengine.cli.options import worker_option
from zmqengine_client import Client


@click.command()
@worker_option
def drain(address: str | None) -> None:
    """Let a worker finish what runs, take nothing new, and exit with 0."""
    with Client(address, name="drain") as client:
        client.drain()
    click.echo("draining: the worker ends when its requests have", err=True)
