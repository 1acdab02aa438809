"""`zmqengine embed`: texts in, vectors out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
import msgspec

from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, given, model_option, worker_options
from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine.errors import ContextExceeded
from zmqengine_client import Client

if TYPE_CHECKING:
    import numpy as np

BLOCK_TEXTS = 4096
"""Texts that are held at once, with their vectors."""


@click.command()
@click.argument("file", type=click.File("rb"), default="-")
@worker_options
@model_option
@click.option(
    "--field", default="text", show_default=True, help="The field of an object that holds its text."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one array there instead: .npy.",
)
@click.option("--dimensions", type=int, help="Number of leading floats of each vector to keep.")
@click.option("--prompt", help="The name of a prompt of the model that goes before each text, such as query.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long for the model.")
@click.option(
    "--priority", type=int, help="-100 to 100; the lower is served first.  [default: 1, batch work]"
)
def embed(
    file: BinaryIO,
    target: WorkerTarget,
    field: str,
    out: Path | None,
    dimensions: int | None,
    prompt: str | None,
    truncate: bool,
    priority: int | None,
) -> int:
    """Turn the texts in FILE into vectors; without one, or with -, those on standard input.

    A line is a text, or JSON: a string, or an object with its text in a field. Each becomes a line of JSON with an
    `embedding`, the other fields kept. Lines without text are passed over.
    """
    if file.name == "<stdin>" and sys.stdin.isatty():
        raise click.UsageError("no FILE given", click.get_current_context())
    if out is not None:
        # A file that cannot be written is told before the work, not after it.
        out.open("ab").close()
    documents = _documents(file, field)
    arrays: list[np.ndarray] = []
    done = 0
    with ready_client(target, name="embed") as client:
        while block := list(islice(documents, BLOCK_TEXTS)):
            texts = [str(document[field]) for _, document in block]
            options = given({"priority": priority, "truncate": truncate or None})
            try:
                vectors = _vectors(client, texts, done, dimensions=dimensions, prompt=prompt, **options)
            except ContextExceeded as error:
                if error.text is None:
                    raise
                reason = error.message.removeprefix(f"text {error.text} ")
                raise click.ClickException(
                    # The advice for it elsewhere is about prompts.
                    f"{file.name}, line {block[error.text][0]}: the text {reason} with --truncate"
                ) from None
            done += len(texts)
            if out is not None:
                arrays.append(vectors)
                continue
            for (_, document), vector in zip(block, vectors, strict=True):
                click.echo(msgspec.json.encode({**document, "embedding": vector.tolist()}).decode())
    if out is not None:
        _write(out, arrays)
        click.echo(f"{done} vectors in {out}", err=True)
    return 0


def _vectors(client: Client, texts: list[str], before: int, **options: object) -> np.ndarray:
    """Vectors of a block, with a progress line."""
    done_texts = [0]

    def note(done: int, _: int) -> None:
        done_texts[0] = done

    def line() -> str:
        return f"{before + done_texts[0]:,} texts {bar(done_texts[0] / len(texts))}"

    with ProgressLine(line):
        return client.embed(texts, on_progress=note, **options)  # type: ignore[arg-type]


def _documents(file: BinaryIO, field: str) -> Iterator[tuple[int, dict[str, object]]]:
    """A document for each line with a text, and the number of the line. Raises `UsageError` for one without `field`."""
    for number, line in enumerate(file, start=1):
        try:
            text = (line if isinstance(line, str) else line.decode()).strip()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{file.name}, line {number}: not UTF-8: {error}") from None
        if not text:
            continue
        document = _document(text, field)
        if not isinstance(document.get(field), str):
            raise click.UsageError(
                f"{file.name}, line {number}: the object has no text in {field!r}: name the field with --field"
            )
        if document[field]:
            yield number, document


def _document(text: str, field: str) -> dict[str, object]:
    if text[0] in '{"':
        try:
            read = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # A text may begin with a brace or a quotation mark.
            return {field: text}
        return read if isinstance(read, dict) else {field: read}
    return {field: text}


def _write(out: Path, arrays: list[np.ndarray]) -> None:
    import numpy as np

    with out.open("wb") as file:
        np.save(file, np.concatenate(arrays) if arrays else np.zeros((0, 0), np.float32))
