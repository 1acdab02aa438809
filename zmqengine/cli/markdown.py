"""The answer of a model on the terminal, as Markdown where that can be drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Write = Callable[[str], None]


@contextmanager
def answer_writer() -> Iterator[Write]:
    """A function that writes parts of an answer to standard output: as Markdown on a terminal, as they are elsewhere.

    Without the package `rich` a terminal gets the text as it is too.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            from zmqengine.cli.markdown_screen import MarkdownScreen

            with MarkdownScreen(Console(highlight=False)) as screen:
                yield screen.write
            return
    yield write_plain


def write_plain(text: str) -> None:
    """Write a text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
