"""`zmqengine chat`: a conversation in the terminal, or one question."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from zmqengine.cli.commands.chat.conversation import Conversation
from zmqengine.cli.commands.chat.model_choice import (
    models_of_launcher,
    models_of_this_machine,
    runs_nothing,
    split_question,
    worker_for,
)
from zmqengine.cli.commands.chat.slash import TerminalChat
from zmqengine.cli.commands.chat.talks import find_talks, load_talk, new_name
from zmqengine.cli.flags import WorkerTarget, generation_options, given, model_option, worker_options
from zmqengine.paths import state_directory

_HISTORY_LINES = 1000
QUOTES = '"""'


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] [QUESTION]...")
@worker_options
@model_option
@click.option("--system", help="Instructions placed before the conversation.")
@click.option(
    "-n", "--max-tokens", type=int, help="Stop an answer after this many tokens.  [default: as many as fit]"
)
@generation_options
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A text file behind QUESTION; repeatable.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image with the first question, for a model that sees; repeatable.",
)
@click.option(
    "--load", "loaded", metavar="NAME", help="Go on with a talk that was kept; `last` is the newest."
)
@click.option(
    "--find", "words", multiple=True, metavar="WORD", help="List the talks with this word, and exit."
)
@click.option("--no-log", is_flag=True, help="Keep neither the talk nor what is typed.")
@click.option("--stats", is_flag=True, help="Print statistics after each answer, on standard error.")
def chat(
    arguments: tuple[str, ...],
    target: WorkerTarget,
    system: str | None,
    stats: bool,
    max_tokens: int | None,
    files: tuple[Path, ...],
    images: tuple[str, ...],
    loaded: str | None,
    words: tuple[str, ...],
    no_log: bool,
    **options: Any,
) -> int:
    """Talk with a model, or ask it one QUESTION and exit.

    The first argument is the MODEL of `zmqengine serve`, unless --model or --worker names one or it has a space.
    Without one a model that is loaded answers, or the largest that this machine can load. Where neither `zmqengine
    serve` nor a worker runs, the model is loaded for this talk alone. A QUESTION of - is standard input. /help inside
    lists further commands.
    """
    if words:
        for line in find_talks(words):
            click.echo(line)
        return 0
    loads = runs_nothing(target)
    models = models_of_this_machine() if loads else models_of_launcher()
    target, asked = split_question(target, arguments, models, loads=loads)
    question = _question(asked, files)
    is_talk = question is not None or sys.stdin.isatty()
    with (
        worker_for(target, models) if loads else contextlib.nullcontext(target) as worker,
        Conversation(worker, system, given(options) | {"max_tokens": max_tokens}) as conversation,
    ):
        session = TerminalChat(conversation, new_name() if is_talk and not no_log else "", stats=stats)
        if loaded is not None:
            conversation.resume(load_talk(loaded).messages)
        for image in images:
            conversation.show(image)
        if question is not None:
            return int(not session.answer(lambda: conversation.say(question)))
        with _history(keep=not no_log):
            return _talk(session)


def _question(asked: Sequence[str], files: Sequence[Path]) -> str | None:
    """The question of the command line, with standard input and files; None for a conversation."""
    if not asked and not files:
        return None
    words = [sys.stdin.read() if word == "-" else word for word in asked]
    texts = [f"{path.name}:\n\n{path.read_text(errors='replace')}" for path in files]
    return "\n\n".join([*([" ".join(words)] if words else []), *texts])


def _talk(session: TerminalChat) -> int:
    if sys.stdin.isatty():
        click.echo(f"{session.conversation.model}: /help shows the commands, Ctrl-D leaves.", err=True)
    failures = [line for line in _lines() if not session.handle(line)]
    # A person has seen what failed; a script looks at the status.
    return int(bool(failures) and not sys.stdin.isatty())


def _lines() -> Iterator[str]:
    """Lines of input, and texts of several lines between triple quotes, until its end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
            if line.lstrip().startswith(QUOTES):
                line = _several(line.lstrip().removeprefix(QUOTES), "... " if is_terminal else "")
            yield line
        except KeyboardInterrupt:
            click.echo("\nCtrl-D leaves", err=True)
        except EOFError:
            if is_terminal:
                click.echo()
            return


def _several(line: str, prompt: str) -> str:
    """The lines up to the one that ends with the quotes."""
    lines = [line]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(prompt))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


@contextlib.contextmanager
def _history(*, keep: bool) -> Iterator[None]:
    """Line editing and a history across sessions, where readline is available."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    path = state_directory() / "chat"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep:
                # Conversations are private.
                path.touch(mode=0o600)
                readline.write_history_file(path)
