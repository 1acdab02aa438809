"""Clients for commands, with a progress line while the worker loads its model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import click

from zmqengine.cli.flags import WorkerTarget
from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine.errors import ConfigError, ZmqEngineError
from zmqengine.protocol.addresses import ipc_path, resolve
from zmqengine.protocol.launcher import ModelList, launcher_address
from zmqengine_client import Client, ClientEvent
from zmqengine_client.keys import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE, CurveKeys, load_keys
from zmqengine_client.launcher import AsyncLauncher

LAUNCHER_ANSWER_S = 2.0
FRONT_END_URL = "http://127.0.0.1:8000"
"""A front-end with its own default port."""


def connect(target: WorkerTarget, *, name: str, **more: Any) -> Client:
    """A client of one worker, which connects with its first call."""
    return Client(resolve(target.address), name=name, keys=keys_of(target), **more)


@contextlib.contextmanager
def ready_client(target: WorkerTarget, *, name: str) -> Iterator[Client]:
    """A client of a worker, or of a launcher's model, that is loaded."""
    progress: list[str] = []

    def tell(event: ClientEvent) -> None:
        if event.kind == "loading":
            progress[:] = [event.message]
        else:
            _tell(event)

    connected = Client(target.address, model=target.model, name=name, keys=keys_of(target), on_event=tell)
    with _unwound_by_sigterm(), connected as client:
        with ProgressLine(lambda: progress[-1] if progress else None if target.model else loading(client)):
            client.wait_ready()
        yield client


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Has SIGTERM leave the contexts inside before it ends the process, so that a client aborts its requests.

    A worker goes on with those of a client that is gone without a word, which may come back.
    """

    def terminate(*_: object) -> None:
        raise _Terminated

    earlier = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, earlier)


def launched_models() -> ModelList | None:
    """The models of this user's launcher; None if there is none that answers."""
    address = launcher_address()
    if not ipc_path(address).exists():
        return None

    async def ask() -> ModelList:
        async with AsyncLauncher(address, answer_timeout_s=LAUNCHER_ANSWER_S) as launcher:
            return await launcher.models()

    try:
        return asyncio.run(ask())
    except ZmqEngineError:
        return None


def front_end_url() -> str:
    """The address of the HTTP front-end: of this user's launcher if it runs, else the usual one."""
    listed = launched_models()
    return (listed.http if listed is not None else "") or FRONT_END_URL


def worker_addresses(given: Sequence[str]) -> list[tuple[str, str | None]]:
    """Names and addresses of workers: those given, or those of the launcher's models, or the default worker."""
    if not given and not os.environ.get("ZMQENGINE_ADDRESS") and (listed := launched_models()) is not None:
        return [(entry.name, entry.address) for entry in listed.models if not entry.never]
    return [(address or "default", address) for address in given or (None,)]


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
