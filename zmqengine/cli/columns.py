"""Texts that grow side by side on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

_BETWEEN = " | "


def side_by_side(texts: Sequence[str], width: int) -> list[str]:
    """The texts wrapped in columns of equal width, as lines of at most `width` characters."""
    column = (width - len(_BETWEEN) * (len(texts) - 1)) // len(texts)
    wrapped = [
        [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, column) or [""]]
        for text in texts
    ]
    height = max(map(len, wrapped))
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in wrapped), strict=True)
    return [_BETWEEN.join(cell.ljust(column) for cell in row).rstrip() for row in rows]


class Columns:
    """Draws over what it drew before."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, texts: Sequence[str]) -> None:
        """Show the texts, or their ends if the terminal is not high enough."""
        size = shutil.get_terminal_size()
        lines = side_by_side(texts, size.columns - 1)[-(size.lines - 2) :]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        sys.stdout.write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = len(lines)
