"""Markdown on a terminal: drawn while it grows, and whole at the end."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from zmqengine.cli.markdown_screen import MarkdownScreen, finished_end

TEXT = """# Lists

A paragraph of a few words that is wider than the forty columns of this screen, so that it has to be wrapped.

- one

- two

```python
def add(a, b):

    return a + b
```

**The end.**
"""


def drawn(text: str, sizes: random.Random) -> str:
    """The bytes that a terminal of 40 columns and 12 lines gets for a text that comes in parts."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=40, height=12)
    with MarkdownScreen(console) as screen:
        at = 0
        while at < len(text):
            size = sizes.randint(1, 9)
            screen.write(text[at : at + size])
            at += size
    return file.getvalue()


def screen_lines(output: str) -> list[str]:
    """The lines that stand on the terminal after this output, without colours."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(output):
        char = output[at]
        if char == "\x1b":
            end = at + 2
            while not output[end].isalpha():
                end += 1
            number = output[at + 2 : end]
            if output[end] == "A":
                row = max(0, row - int(number or 1))
            elif output[end] == "K":
                lines[row] = lines[row][:column] if number in ("", "0") else ""
            at = end + 1
            continue
        if char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif char == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
        at += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("seed", range(5))
def test_however_it_comes_each_text_stands_there_once_and_no_word_is_broken(seed: int) -> None:
    """Drafts of an unfinished paragraph are erased; the terminal used to break words at its edge."""
    lines = screen_lines(drawn(TEXT, random.Random(seed)))
    words = " ".join(lines).split()
    for word in ("paragraph", "forty", "columns", "wrapped.", "return", "end."):
        assert words.count(word) == 1, (word, lines)
    assert max(map(len, lines)) <= 40
    assert not any("```" in line or "**" in line for line in lines)


def test_reasoning_stands_dim_before_the_answer() -> None:
    """Each once, also where the answer begins in the middle of a draft."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=40, height=12)
    with MarkdownScreen(console) as screen:
        for part in ("\nI think of ", "a cat.\n"):
            screen.think(part)
        screen.write("It is a **cat**.")
    assert [line for line in screen_lines(file.getvalue()) if line] == ["I think of a cat.", "It is a cat."]
    assert "\x1b[2mI think of a cat.\x1b[0m" in file.getvalue()


def test_code_has_colours() -> None:
    """A word of the language stands out."""
    assert "\x1b[" in drawn(TEXT, random.Random(0)).split("def")[0][-12:]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\n", ""),
        ("one\n\n", ""),
        ("- one\n\n- two", ""),
        ("- one\n\n  more", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nb\n", ""),
    ],
)
def test_a_block_is_finished_when_nothing_can_change_it(text: str, finished: str) -> None:
    """A list and a fence hold blank lines."""
    assert text[: finished_end(text)] == finished
