"""`zmqengine chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from zmqengine.cli.advice import one_line
from zmqengine.cli.answer import write_answer
from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, generation_options, given, model_option, worker_options
from zmqengine.errors import ContextExceeded, RequestError, ZmqEngineError
from zmqengine_client import Client
from zmqengine_client.images.sources import file_bytes

HELP = """/image FILE  show an image with the next question
/reset       start a new conversation
/help        show this
Ctrl-C stops the answer, Ctrl-D leaves."""
_HISTORY_LINES = 1000


@click.command()
@worker_options
@model_option
@click.option("--system", help="Instructions placed before the conversation.")
@click.option(
    "-n", "--max-tokens", type=int, help="Stop an answer after this many tokens.  [default: as many as fit]"
)
@generation_options
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image with the first question, for a model that sees; repeatable.",
)
@click.option("--stats", is_flag=True, help="Print statistics after each answer, on standard error.")
def chat(
    target: WorkerTarget,
    system: str | None,
    stats: bool,
    max_tokens: int | None,
    images: tuple[str, ...],
    **options: Any,
) -> int:
    """Talk with the model. /help inside lists further commands."""
    with ready_client(target, name="chat") as client, _history():
        conversation = ChatHistory(client, system, given(options) | {"max_tokens": max_tokens})
        for image in images:
            conversation.show(image)
        if sys.stdin.isatty():
            click.echo("/help shows the commands, Ctrl-D leaves.", err=True)
        failures = [line for line in _lines() if not _handle(conversation, line, stats)]
    # A person has seen what failed; a script looks at the status.
    return int(bool(failures) and not sys.stdin.isatty())


class ChatHistory:
    """The messages of a conversation, and the request for the next one."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._system = system
        self._options = options
        self.messages: list[dict[str, Any]] = []
        self._images: list[bytes] = []
        self.reset()

    def reset(self) -> None:
        """Drop all messages but the instructions."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._images = []

    def show(self, path: str) -> None:
        """Show an image with the next question. Raises `BadRequest` for a file that cannot be read."""
        # Read once: the file may change while the conversation goes on.
        self._images.append(file_bytes(Path(path).expanduser()))

    def say(self, text: str) -> str:
        """Write the model's answer to `text`; returns its timing. An interrupted answer is kept.

        If the request fails the conversation is unchanged.
        """
        shown = [{"type": "image", "image": image} for image in self._images]
        question = {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}
        answer = write_answer(self._client.chat([*self.messages, question], **self._options))
        click.echo(" [stopped]" if answer.interrupted else "")
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        self._images = []
        return answer.summary

    def drop_images(self) -> bool:
        """Drop the images of the next question; returns whether there were any."""
        dropped, self._images = bool(self._images), []
        return dropped


def _handle(conversation: ChatHistory, line: str, stats: bool) -> bool:
    """Carry out a line of input; returns whether it succeeded."""
    command = line.strip()
    if command == "/reset":
        conversation.reset()
        click.echo("a new conversation", err=True)
    elif command.startswith("/image "):
        return _show(conversation, command.removeprefix("/image ").strip())
    elif command == "/help":
        click.echo(HELP, err=True)
    elif command.startswith("/"):
        click.echo(f"{command.split()[0]} is not a command: type /help for a list", err=True)
        return False
    elif command:
        return _answer(conversation, line, stats)
    return True


def _show(conversation: ChatHistory, path: str) -> bool:
    try:
        conversation.show(path)
    except ZmqEngineError as error:
        click.echo(f"zmqengine: {one_line(error)}", err=True)
        return False
    click.echo(f"{path} goes with the next question", err=True)
    return True


def _answer(conversation: ChatHistory, line: str, stats: bool) -> bool:
    try:
        summary = conversation.say(line)
    except ContextExceeded as error:
        click.echo(f"zmqengine: {error.message}; /reset starts a new conversation", err=True)
    except ZmqEngineError as error:
        click.echo(f"zmqengine: {one_line(error)}", err=True)
        # With an image at fault every later question would fail too.
        if isinstance(error, RequestError) and conversation.drop_images():
            click.echo("the images are dropped: /image shows them again", err=True)
    except KeyboardInterrupt:
        click.echo(" [left unfinished]")
        return True
    else:
        if stats:
            click.echo(f"[{summary}]", err=True)
        return True
    return False


def _lines() -> Iterator[str]:
    """Lines of input, until its end."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            click.echo("\nCtrl-D leaves", err=True)
        except EOFError:
            if prompt:
                click.echo()
            return


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing and a history across sessions, where readline is available."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "zmqengine" / "chat"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Conversations are private.
            path.touch(mode=0o600)
            readline.write_history_file(path)
