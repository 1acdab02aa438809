"""`zmqengine generate`: text in, text out."""

from __future__ import annotations

import sys
from typing import Any, BinaryIO

import click
import msgspec

from zmqengine.cli.advice import EXIT_INTERRUPTED
from zmqengine.cli.answer import WrittenAnswer, write_answer
from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, generation_options, given, model_option, worker_options


@click.command()
@click.argument("prompt", required=False)
@worker_options
@model_option
@click.option(
    "-n", "--max-tokens", type=int, default=256, show_default=True, help="Stop after this many tokens."
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop where the model would.")
@generation_options
@click.option("--schema", type=click.File("rb"), metavar="FILE", help="The text is JSON of this JSON schema.")
@click.option("--regex", metavar="REGEX", help="The text matches this expression.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The text is one of these; repeatable.")
@click.option("--any-json", is_flag=True, help="The text is a JSON object.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image before PROMPT; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option(
    "--stats/--no-stats", default=None, help="Statistics on standard error.  [default: on a terminal]"
)
def generate(
    prompt: str | None,
    target: WorkerTarget,
    as_json: bool,
    stats: bool | None,
    schema: BinaryIO | None,
    any_json: bool,
    **options: Any,
) -> int:
    """Continue PROMPT; without one, or with -, the text on standard input."""
    if sum(map(bool, (schema, options["regex"], options["choice"], any_json))) > 1:
        raise click.UsageError("give one of --schema, --regex, --choice and --any-json")
    if "" in options["choice"]:
        raise click.UsageError("--choice must have at least 1 character")
    if schema or any_json:
        options["schema"] = _schema(schema) if schema else {"type": "object"}
    text = _prompt(prompt)
    with ready_client(target, name="generate") as client:
        stream = client.generate(text, **given(options))
        if as_json:
            stream.text()
            click.echo(msgspec.json.encode(stream.result).decode())
            return 0
        answer = write_answer(stream)
    _end_line(answer, sys.stderr.isatty() if stats is None else stats)
    return EXIT_INTERRUPTED if answer.interrupted else 0


def _prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no PROMPT given", click.get_current_context())
    return sys.stdin.read() if prompt in (None, "-") else str(prompt)


def _schema(file: BinaryIO) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.UsageError(f"--schema {file.name}: not a JSON schema: {error}") from None


def _end_line(answer: WrittenAnswer, stats: bool) -> None:
    if sys.stdout.isatty() and not answer.text.endswith("\n"):
        click.echo()
    if stats:
        click.echo(f"[{answer.summary}]", err=True)
