"""`zmqengine models`: a list of local models."""

from __future__ import annotations

import json
from pathlib import Path

import click

from zmqengine.checkpoint.estimate import ModelCheckpoint, open_checkpoint
from zmqengine.checkpoint.on_disk import Found, find_models, hub_cache
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.cli.quantities import byte_size, shown
from zmqengine.doctor.machine import look_at_machine
from zmqengine.pico import BUNDLED, model_path

CHAT_TOKENS = 8_192
HEADERS = ("model", "type", "size", "quantised", "context", "cache", "chats")


@click.command()
@click.argument("directories", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--memory-limit",
    type=byte_size,
    metavar="SIZE",
    help="Memory that MLX may use, if not what the system reports.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
def models(directories: tuple[Path, ...], memory_limit: int | None, as_json: bool) -> None:
    """List the models of this machine: the bundled ones, the hub's cache, and those in DIRECTORIES.

    The last column is the number of chats of 8,192 tokens, or of the context if that is shorter, that fit at once.
    """
    limit = memory_limit or look_at_machine().limit_bytes
    found = [*(Found(name, model_path(name)) for name in BUNDLED), *find_models(directories)]
    documents = [_document(model, limit) for model in found]
    if as_json:
        click.echo(json.dumps(documents, indent=2))
        return
    lines = [HEADERS, *(_cells(document) for document in documents)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADERS))]
    for line in lines:
        click.echo("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    if len(found) == len(BUNDLED):
        click.echo(f"\nnothing fetched in {hub_cache()} yet: zmqengine pull OWNER/NAME", err=True)


def _document(found: Found, limit: int) -> dict[str, object]:
    try:
        checkpoint = open_checkpoint(found.directory)
    except CheckpointError as error:
        return {"model": found.name, "directory": str(found.directory), "error": str(error)}
    return {
        "model": found.name,
        "directory": str(found.directory),
        "type": checkpoint.model_type,
        "bytes": checkpoint.weights.total_bytes,
        "quantisation": checkpoint.quantisation,
        "context_tokens": checkpoint.shape.context_tokens,
        "cache": checkpoint.shape.kind,
        "fits": None if not limit else checkpoint.kv_budget(limit) > 0,
        "chats": _chats(checkpoint, limit),
        "chat_tokens": min(CHAT_TOKENS, checkpoint.shape.context_tokens),
    }


def _chats(checkpoint: ModelCheckpoint, limit: int) -> int | None:
    if not limit:
        return None
    return checkpoint.chats(limit, min(CHAT_TOKENS, checkpoint.shape.context_tokens))


def _cells(document: dict[str, object]) -> tuple[str, ...]:
    if "error" in document:
        return str(document["model"]), "", "", "", "", "", str(document["error"])
    if document["fits"] is False:
        fits = "too large"
    elif document["chats"] is None:
        fits = "any" if document["fits"] else "?"
    else:
        fits = f"{document['chats']:,}"
    return (
        str(document["model"]), str(document["type"]), shown(int(str(document["bytes"]))),
        str(document["quantisation"] or "no"), f"{document['context_tokens']:,}", str(document["cache"]), fits,
    )  # fmt: skip
