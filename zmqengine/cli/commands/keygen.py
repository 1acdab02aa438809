"""`zmqengine keygen`: one CURVE key pair."""

from __future__ import annotations

from pathlib import Path

import click

from zmqengine.worker.wire.keys import write_key_pair


@click.command()
@click.argument("name")
@click.option(
    "-d",
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to write the two files.  [default: here]",
)
def keygen(name: str, directory: Path) -> None:
    """Make a key pair: NAME.key to give to the other side, and NAME.key_secret to keep.

    A worker needs its own pair (--server-key worker.key_secret) and the NAME.key of everybody who may connect, in
    one directory (--authorized-keys DIR). Whoever connects needs their own pair and the worker's worker.key.
    """
    files = write_key_pair(directory, name)
    click.echo(f"{files.public}\n{files.secret}")
