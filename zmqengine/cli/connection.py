"""A client for a command, with the worker's loading shown to whoever waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine.errors import ZmqEngineError
from zmqengine_client import Client, ClientEvent


@contextlib.contextmanager
def ready_client(address: str | None, *, name: str) -> Iterator[Client]:
    """A client of a worker that has its model loaded."""
    with Client(address, name=name, on_event=_tell) as client:
        with ProgressLine(lambda: _loading(client)):
            client.wait_ready()
        yield client


def _tell(event: ClientEvent) -> None:
    if event.kind in ("lost", "restarted", "fatal"):
        click.echo(f"\nzmqengine: {event.message}", err=True)


def _loading(client: Client) -> str | None:
    try:
        description = client.describe()
    except ZmqEngineError:
        return "waiting for the worker"
    if description.state not in ("loading", "warming"):
        return None
    fraction = description.progress.fraction
    shown = "" if fraction is None else f" {bar(fraction)}"
    return f"the worker is {description.state}: {description.progress.stage}{shown}"
