"""`zmqengine models`: a list of local models."""

from __future__ import annotations

import json
from pathlib import Path

import click

from zmqengine.checkpoint.estimate import LEAST_TOKENS, ModelCheckpoint, open_checkpoint
from zmqengine.checkpoint.first_models import advice
from zmqengine.checkpoint.on_disk import Found, find_models, hub_cache
from zmqengine.checkpoint.other_programs import Foreign, foreign_models
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.cli.columns import columns
from zmqengine.cli.quantities import byte_size, shown
from zmqengine.doctor.machine import look_at_machine
from zmqengine.pico import BUNDLED, model_path
from zmqengine.serve.entries import need_bytes

CHAT_TOKENS = LEAST_TOKENS
HEADERS = ("model", "from", "type", "size", "needs", "quantised", "context", "cache", "chats")


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
    """List the models of this machine: bundled, in the hub's cache, in DIRECTORIES, LM Studio's and Ollama's.

    "needs" is the memory that `zmqengine serve` reckons with: the weights and one chat, or one batch of texts. The last
    column is the number of chats of 8,192 tokens, or of the context if that is shorter, that fit at once.
    """
    limit = memory_limit or look_at_machine().limit_bytes
    models_on_disk = [*(Found(name, model_path(name)) for name in BUNDLED), *find_models(directories)]
    others = list(foreign_models())
    documents = [_document(model, limit) for model in models_on_disk]
    documents += [_foreign_document(model, limit) for model in others]
    if as_json:
        click.echo(json.dumps(documents, indent=2))
        return
    for line in columns([HEADERS, *(_cells(document) for document in documents)]):
        click.echo(line)
    for document in documents:
        if document.get("missing_head"):
            click.echo(f"{document['model']}: {document['missing_head']}", err=True)
    if len(documents) == len(BUNDLED):
        fetched = advice(limit) or "zmqengine pull OWNER/NAME fetches one"
        click.echo(f"\nonly toys here, and nothing in {hub_cache()} yet: {fetched}", err=True)


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
        "need_bytes": need_bytes(checkpoint),
        "quantisation": checkpoint.quantisation,
        "context_tokens": checkpoint.shape.context_tokens,
        "cache": checkpoint.shape.kind,
        "fits": None if not limit else checkpoint.kv_budget(limit) > 0,
        "chats": _chats(checkpoint, limit),
        "missing_head": checkpoint.missing_head,
        "chat_tokens": min(CHAT_TOKENS, checkpoint.shape.context_tokens),
    }


def _foreign_document(model: Foreign, limit: int) -> dict[str, object]:
    """Another program's model. Ollama's have no directory that could be given to a worker."""
    if not model.problem:
        return _document(Found(model.name, model.directory), limit) | {"program": model.program}
    return {
        "model": model.name,
        "directory": str(model.directory),
        "program": model.program,
        "bytes": model.size_bytes,
        "error": model.problem,
    }


def _chats(checkpoint: ModelCheckpoint, limit: int) -> int | None:
    if not limit:
        return None
    return checkpoint.chats(limit, min(CHAT_TOKENS, checkpoint.shape.context_tokens))


def _cells(document: dict[str, object]) -> tuple[str, ...]:
    if "error" in document:
        size = shown(int(str(document["bytes"]))) if document.get("bytes") else ""
        return str(document["model"]), _of(document), "", size, "", "", "", "", str(document["error"])
    if document["fits"] is False:
        fits = "too large"
    elif document["chats"] is None:
        fits = "any" if document["fits"] else "?"
    else:
        fits = f"{document['chats']:,}"
    return (
        str(document["model"]), _of(document), str(document["type"]), shown(int(str(document["bytes"]))),
        shown(int(str(document["need_bytes"]))),
        str(document["quantisation"] or "no"), f"{document['context_tokens']:,}", str(document["cache"]), fits,
    )  # fmt: skip


def _of(document: dict[str, object]) -> str:
    """The program or place that has it."""
    if document["model"] in BUNDLED:
        return "bundled"
    if Path(str(document["directory"])).is_relative_to(hub_cache()):
        return "hub"
    return str(document.get("program", "directory"))
