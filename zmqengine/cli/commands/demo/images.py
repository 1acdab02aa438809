"""`zmqengine demo --image`: questions about pictures that this program draws, and the model's answers."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from zmqengine.cli.commands.demo.tools import show
from zmqengine.cli.flags import WorkerTarget
from zmqengine_client import Client

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 240
"""Pixels a side of a picture. Things stand on three rows and columns."""
_CELL = SIDE // 3
_COLORS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
_TERMINAL_COLUMNS = 12


class Thing(NamedTuple):
    """A circle or a square in a color, and its row and column from 0 to 2."""

    shape: str
    color: str
    row: int
    column: int


QUESTIONS = (
    ((Thing("circle", "red", 1, 1),), "What do you see?"),
    ((Thing("circle", "red", 0, 0), Thing("square", "blue", 1, 2)), "What do you see?"),
    (
        (Thing("square", "green", 0, 1), Thing("square", "green", 1, 0), Thing("square", "green", 2, 2)),
        "How many things are there?",
    ),
)


class ImageFigures(NamedTuple):
    """Totals of the demonstration."""

    images: int
    tokens: int
    seconds: float


def ask_about_images(name: str, max_tokens: int) -> ImageFigures:
    """Show the worker of this name a few pictures with a question each; prints both and the answers."""
    tokens = 0
    with Client(WorkerTarget(name).address, name="demo --image") as client:
        started_s = time.monotonic()
        for things, question in QUESTIONS:
            image = draw(things)
            show("picture", ", ".join(f"{thing.color} {thing.shape}" for thing in things), "cyan")
            if sys.stdout.isatty():
                click.echo("\n".join(" " * 16 + line for line in _as_text(image)))
            show("you", question, "green")
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            stream = client.chat([{"role": "user", "content": parts}], max_tokens=max_tokens)
            show("model", "".join(chunk.text for chunk in stream) + "\n", "yellow")
            tokens += len(stream.result.tokens)
        return ImageFigures(len(QUESTIONS), tokens, time.monotonic() - started_s)


def draw(things: tuple[Thing, ...]) -> Image:
    """The things on white, `SIDE` pixels a side."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    margin = _CELL // 8
    for thing in things:
        left, top = thing.column * _CELL + margin, thing.row * _CELL + margin
        box = (left, top, left + _CELL - 2 * margin, top + _CELL - 2 * margin)
        shape = pen.ellipse if thing.shape == "circle" else pen.rectangle
        shape(box, fill=_COLORS[thing.color])
    return image


def _as_text(image: Image) -> list[str]:
    """The image in blocks of a terminal's 24-bit colors; two characters a pixel, as they are twice as high as wide."""
    columns = _TERMINAL_COLUMNS
    red, green, blue = (image.resize((columns, columns)).tobytes()[channel::3] for channel in range(3))
    cells = [f"\x1b[48;2;{r};{g};{b}m  " for r, g, b in zip(red, green, blue, strict=True)]
    return ["".join(cells[start : start + columns]) + "\x1b[0m" for start in range(0, columns**2, columns)]
