"""The commands inside a chat: lines that begin with a slash."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import click

from zmqengine.cli.advice import one_line
from zmqengine.cli.commands.chat.clipboard import put_on_clipboard
from zmqengine.cli.commands.chat.conversation import Conversation
from zmqengine.cli.commands.chat.talks import LAST, Talk, keep_talk, load_talk, new_name
from zmqengine.errors import ContextExceeded, RequestError, ZmqEngineError


class TerminalChat:
    """A conversation on the terminal, kept as the talk `name` after each answer; empty for none."""

    def __init__(self, conversation: Conversation, name: str, *, stats: bool) -> None:
        self.conversation = conversation
        self.name = name
        self._stats = stats

    def handle(self, line: str) -> bool:
        """Carry out a line of input: a command or a question; returns whether it succeeded."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            return self.answer(lambda: self.conversation.say(line))
        word, _, rest = text.partition(" ")
        command = COMMANDS.get(word)
        if command is None:
            click.echo(f"{word} is not a command: type /help for a list", err=True)
            return False
        try:
            return command.act(self, rest.strip()) is not False
        except (ZmqEngineError, OSError) as error:
            told = one_line(error) if isinstance(error, ZmqEngineError) else str(error)
            click.echo(f"zmqengine: {told}", err=True)
            return False

    def answer(self, ask: Callable[[], str]) -> bool:
        """Write an answer and keep the talk; returns whether it came."""
        try:
            summary = ask()
        except ContextExceeded as error:
            click.echo(f"zmqengine: {error.message}; /reset starts a new conversation", err=True)
        except ZmqEngineError as error:
            click.echo(f"zmqengine: {one_line(error)}", err=True)
            # With an image at fault every later question would fail too.
            if isinstance(error, RequestError) and self.conversation.drop_images():
                click.echo("the images are dropped: /image shows them again", err=True)
        except KeyboardInterrupt:
            click.echo(" [left unfinished]")
            return True
        else:
            if self._stats:
                click.echo(f"[{summary}]", err=True)
            if self.name:
                # A full disk costs the file and not the talk.
                with contextlib.suppress(OSError):
                    keep_talk(self.name, self.talk())
            return True
        return False

    def talk(self) -> Talk:
        """The conversation as it is kept."""
        return Talk(self.conversation.model, self.conversation.messages)


def _help(session: TerminalChat, rest: str) -> None:
    width = max(len(f"{word} {command.takes}") for word, command in COMMANDS.items())
    for word, command in COMMANDS.items():
        click.echo(f"{f'{word} {command.takes}':{width}}  {command.help}", err=True)
    click.echo(
        '""" begins and ends a text of several lines. Ctrl-C stops the answer, Ctrl-D leaves.', err=True
    )


def _reset(session: TerminalChat, rest: str) -> None:
    session.conversation.reset()
    session.name = session.name and new_name()
    click.echo("a new conversation", err=True)


def _image(session: TerminalChat, path: str) -> None:
    session.conversation.show(path)
    click.echo(f"{path} goes with the next question", err=True)


def _system(session: TerminalChat, text: str) -> None:
    session.conversation.instruct(text or None)
    click.echo("the instructions are replaced" if text else "there are no instructions", err=True)


def _set(session: TerminalChat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name:
        session.conversation.set(name, value.strip())
    for line in session.conversation.shown_options() or ["every option has its default"]:
        click.echo(line, err=True)


def _model(session: TerminalChat, name: str) -> None:
    if name:
        session.conversation.use(name)
    click.echo(f"{session.conversation.model} answers", err=True)


def _retry(session: TerminalChat, rest: str) -> bool:
    return session.answer(session.conversation.retry)


def _copy(session: TerminalChat, rest: str) -> None:
    put_on_clipboard(session.conversation.last_answer)
    click.echo("the last answer is on the clipboard", err=True)


def _save(session: TerminalChat, name: str) -> None:
    path = keep_talk(name or session.name or new_name(), session.talk())
    click.echo(f"saved as {path}", err=True)


def _load(session: TerminalChat, name: str) -> None:
    session.conversation.resume(load_talk(name or LAST).messages)
    click.echo(f"{len(session.conversation.messages)} messages are loaded", err=True)


class _Command(NamedTuple):
    act: Callable[[TerminalChat, str], bool | None]
    takes: str
    help: str


COMMANDS: Mapping[str, _Command] = {
    "/image": _Command(_image, "FILE", "show an image with the next question"),
    "/retry": _Command(_retry, "", "answer the last question again"),
    "/copy": _Command(_copy, "", "put the last answer on the clipboard"),
    "/model": _Command(_model, "[NAME]", "have another model of `zmqengine serve` answer"),
    "/system": _Command(_system, "[TEXT]", "replace the instructions"),
    "/set": _Command(_set, "[NAME [VALUE]]", "set an option, such as temperature 0.2; no value: its default"),
    "/save": _Command(_save, "[NAME]", "keep the conversation under a name, or as a file"),
    "/load": _Command(_load, "[NAME]", "go on with one that was kept; no name: the last"),
    "/reset": _Command(_reset, "", "start a new conversation"),
    "/help": _Command(_help, "", "show this"),
}
