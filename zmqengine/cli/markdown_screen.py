"""Markdown on a terminal while it arrives: finished blocks stay, the block that grows is drawn again."""

from __future__ import annotations

import re
import time

from rich.console import Console, Group
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

DRAWN_PER_S = 12
CODE_THEME = "ansi_dark"
"""Pygments' theme of the terminal's own colours, legible on light and dark."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class MarkdownScreen:
    """Use it as a context manager: at its end the whole answer stands on the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""
        self._thought = ""
        # The line that tells how far a prompt is read stands on standard error before the answer.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="crop",
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._drawn_s = 0.0

    def __enter__(self) -> MarkdownScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        self._keep_thought()
        self._keep(self._open)

    def write(self, text: str) -> None:
        """Take the next part of the answer; drawn at most a dozen times a second."""
        self._keep_thought()
        self._open += text
        end = finished_end(self._open)
        if end:
            self._keep(self._open[:end])
            self._open = self._open[end:]
        self._draw(now=bool(end))

    def think(self, text: str) -> None:
        """Take the next part of the reasoning, which is drawn dim."""
        self._thought = (self._thought + text).lstrip()
        self._draw()

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() >= self._drawn_s + 1 / DRAWN_PER_S:
            self._live.update(self._tail(), refresh=True)
            self._drawn_s = time.monotonic()

    def _keep_thought(self) -> None:
        if self._thought.strip():
            self._console.print(_dim(self._thought), "")
        self._thought = ""

    def _keep(self, text: str) -> None:
        if text.strip():
            self._console.print(Markdown(text, code_theme=CODE_THEME))

    def _tail(self) -> Segments | Group:
        """The last lines of the open block that the terminal has room for."""
        if not self._open.strip() and not self._thought:
            return Group()
        drawn = _dim(self._thought) if self._thought else Markdown(self._open, code_theme=CODE_THEME)
        lines = self._console.render_lines(drawn, pad=False)
        shown = lines[-max(1, self._console.height - 2) :]
        return Segments([segment for line in shown for segment in (*line, Segment.line())])


def _dim(text: str) -> Text:
    return Text(text.strip(), style="dim")


def finished_end(text: str) -> int:
    """Length of the part of a Markdown text that what follows no longer changes: its blocks up to the last blank line.

    A list goes on after a blank line, and a fence holds blank lines: neither ends there.
    """
    end, at, fence = 0, 0, ""
    lines = text.splitlines(keepends=True)
    for index, line in enumerate(lines):
        at += len(line)
        mark = _FENCE.match(line)
        if fence:
            closes = mark and line.strip() == mark[1] and mark[1].startswith(fence)
            fence = "" if closes else fence
        elif mark:
            fence = mark[1]
        elif not line.strip() and _starts_block(lines[index + 1 : index + 2]):
            end = at
    return end


def _starts_block(following: list[str]) -> bool:
    """Whether a line that has begun is no part of the list or the code above it."""
    line = following[0] if following else ""
    return bool(line.strip()) and not re.match(r"\s|[-*+]|\d", line)
