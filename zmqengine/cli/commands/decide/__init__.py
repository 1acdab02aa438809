"""`zmqengine decide`: the probabilities of given answers to a question."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import BinaryIO

import click
import msgspec

from zmqengine.cli.columns import columns
from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, given, model_option, worker_options
from zmqengine_client import Answered


@click.command()
@click.argument("question", required=False)
@worker_options
@model_option
@click.option("--choice", "choices", multiple=True, metavar="TEXT", help="An answer; repeatable.")
@click.option(
    "--level", "levels", multiple=True, metavar="TEXT", help="A level of a score, from 0 up; repeatable."
)
@click.option(
    "--questions",
    "file",
    type=click.File("rb"),
    metavar="FILE",
    help="Questions as in POST /v1/decisions: JSON, by their names.",
)
@click.option("--priority", type=int, help="-100 to 100; the lower is served first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def decide(
    question: str | None,
    target: WorkerTarget,
    choices: tuple[str, ...],
    levels: tuple[str, ...],
    file: BinaryIO | None,
    priority: int | None,
    as_json: bool,
) -> int:
    """Answer QUESTION about the text on standard input, by probabilities.

    The answers are yes and no, or those of --choice, or the levels of --level. Nothing is sampled: what is printed is
    the probability of each answer among them, and that the model would answer so at all (coverage).
    """
    if (question is None) == (file is None):
        raise click.UsageError("give either QUESTION or --questions")
    if choices and levels:
        raise click.UsageError("give either --choice or --level")
    questions = _questions(file) if file is not None else {"": _question(str(question), choices, levels)}
    if sys.stdin.isatty():
        raise click.UsageError("no text on standard input", click.get_current_context())
    state = sys.stdin.read()
    with ready_client(target, name="decide") as client:
        answers = client.decide(state, questions, **given({"priority": priority})).answers
    if as_json:
        click.echo(msgspec.json.encode(answers[""] if file is None else answers).decode())
    else:
        click.echo("\n".join(_lines(answers)))
    return 0


def _question(text: str, choices: tuple[str, ...], levels: tuple[str, ...]) -> dict[str, object]:
    if choices:
        return {"type": "choice", "instructions": text, "criteria": list(choices)}
    if levels:
        return {"type": "score", "instructions": text, "criteria": list(levels)}
    return {"type": "yes_no", "instructions": text}


def _questions(file: BinaryIO) -> dict[str, dict[str, object]]:
    try:
        return msgspec.json.decode(file.read(), type=dict[str, dict[str, object]])
    except msgspec.DecodeError as error:
        raise click.UsageError(f"--questions {file.name}: not questions by their names: {error}") from None


def _lines(answers: Mapping[str, Answered]) -> list[str]:
    rows = [
        [*([name] if name else []), answer, f"{probability:.3f}"]
        for name, answered in answers.items()
        for answer, probability in (*answered.probabilities.items(), ("(coverage)", answered.coverage))
    ]
    return columns(rows)
