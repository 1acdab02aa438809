"""`zmqengine adapters`: the LoRA adapters of a worker's model, loaded and unloaded while it serves."""

from __future__ import annotations

import json
from pathlib import Path

import click

from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, model_option, worker_options
from zmqengine_client import Client


@click.group()
def adapters() -> None:
    """List, load and unload LoRA adapters of a worker's model while it serves."""


@adapters.command("list")
@worker_options
@model_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
def list_(target: WorkerTarget, as_json: bool) -> None:
    """Show the names that a request may have."""
    with ready_client(target, name="adapters") as client:
        names = _names(client)
    if as_json:
        click.echo(json.dumps(names))
        return
    for name in names:
        click.echo(name)
    if not names:
        click.echo("none: zmqengine adapters load NAME DIR", err=True)


@adapters.command()
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@worker_options
@model_option
def load(name: str, directory: Path, target: WorkerTarget) -> None:
    """Load the adapter in DIRECTORY, with mlx-lm's or PEFT's files, for requests that name it NAME.

    DIRECTORY is on the worker's machine.
    """
    with ready_client(target, name="adapters") as client:
        client.load_adapter(name, str(directory.expanduser().absolute()))
        model = client.describe().model
    assert model is not None, "the model is loaded"
    click.echo(f"{name} is loaded: --adapter {name}, or over HTTP the model {model.name}:{name}", err=True)


@adapters.command()
@click.argument("name")
@worker_options
@model_option
def unload(name: str, target: WorkerTarget) -> None:
    """Refuse new requests that name the adapter NAME, and free its memory when the last one has ended."""
    with ready_client(target, name="adapters") as client:
        names = _names(client)
        if name not in names:
            raise click.ClickException(
                f"there is no adapter {name!r}: the model has {', '.join(names) or 'none'}"
            )
        client.unload_adapter(name)
    click.echo(f"{name} is unloaded: requests that have it end as they would", err=True)


def _names(client: Client) -> list[str]:
    model = client.describe().model
    return [] if model is None else model.adapters
