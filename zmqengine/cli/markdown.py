"""The answer of a model on the terminal, as Markdown where that can be drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import click

Write = Callable[[str], None]


class TerminalWriter(NamedTuple):
    """The functions that write parts of an answer, and of the reasoning before it."""

    write: Write
    think: Write


@contextmanager
def answer_writer() -> Iterator[TerminalWriter]:
    """A writer to standard output: Markdown behind dimmed reasoning on a terminal, the answer alone elsewhere.

    Without the package `rich` a terminal gets the text as it is too.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            yield TerminalWriter(write_plain, lambda text: write_plain(click.style(text, dim=True)))
        else:
            from zmqengine.cli.markdown_screen import MarkdownScreen

            with MarkdownScreen(Console(highlight=False)) as screen:
                yield TerminalWriter(screen.write, screen.think)
        return
    yield PLAIN


def write_plain(text: str) -> None:
    """Write a text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


PLAIN = TerminalWriter(write_plain, lambda text: None)
