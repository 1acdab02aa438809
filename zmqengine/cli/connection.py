"""Clients for commands, with a progress line while the worker loads its model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import click

from zmqengine.cli.options import WorkerTarget
from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine.errors import ConfigError, ZmqEngineError
from zmqengine_client import Client, ClientEvent
from zmqengine_client.keys import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE, CurveKeys, load_keys


def connect(target: WorkerTarget, *, name: str, **more: Any) -> Client:
    """A client that connects with its first call."""
    return Client(target.address, name=name, keys=keys_of(target), **more)


@contextlib.contextmanager
def ready_client(target: WorkerTarget, *, name: str) -> Iterator[Client]:
    """A client of a worker that has its model loaded."""
    with connect(target, name=name, on_event=_tell) as client:
        with ProgressLine(lambda: loading(client)):
            client.wait_ready()
        yield client


def keys_of(target: WorkerTarget) -> CurveKeys | None:
    """The keys named by the options; None to take them from the environment. Raises `ConfigError`."""
    if target.client_key is None and target.server_key is None:
        return None
    client_key = target.client_key or os.environ.get(CLIENT_KEY_VARIABLE)
    server_key = target.server_key or os.environ.get(SERVER_KEY_VARIABLE)
    if client_key is None or server_key is None:
        raise ConfigError("--client-key and --server-key belong together: give both")
    return load_keys(client_key, server_key)


def _tell(event: ClientEvent) -> None:
    if event.kind in ("lost", "restarted", "fatal"):
        click.echo(f"\nzmqengine: {event.message}", err=True)


def loading(client: Client) -> str | None:
    """The worker's progress in loading, as text; None once it is ready."""
    try:
        description = client.describe()
    except ZmqEngineError:
        return "waiting for the worker"
    if description.state not in ("loading", "warming"):
        return None
    fraction = description.progress.fraction
    shown = "" if fraction is None else f" {bar(fraction)}"
    return f"the worker is {description.state}: {description.progress.stage}{shown}"
