"""Pictures of a few things on a white ground, and the scenes that they show."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from tools.pico.draw import Draw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 200, 40),
    "purple": (140, 60, 170),
    "black": (30, 30, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple("0123456789")
ROWS = 3
"""Rows and columns of places for things."""
SIDE = 48
"""Pixels a side of what the model sees."""
THINGS_MAX = 4
_SUPERSAMPLED = 8
# A display of seven segments: top, top left, top right, middle, bottom left, bottom right, bottom.
_SEGMENTS = {
    "0": "1110111", "1": "0010010", "2": "1011101", "3": "1011011", "4": "0111010",
    "5": "1101011", "6": "1101111", "7": "1010010", "8": "1111111", "9": "1111011",
}  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A shape, or a digit, in a color. Rows and columns count from 0; it fills the share `size` of its place."""

    kind: str
    color: str
    row: int
    column: int
    size: float = 0.8

    @property
    def is_digit(self) -> bool:
        """Whether it is a digit."""
        return self.kind in DIGITS


@dataclass(frozen=True)
class Scene:
    """Things in reading order."""

    things: tuple[Thing, ...]

    @property
    def key(self) -> str:
        """Name of the scene for the split, whatever the sizes are."""
        return "/".join(f"{thing.kind} {thing.color} {thing.row}{thing.column}" for thing in self.things)


def scenes_of(draw: Draw) -> Scene:
    """A scene of one split: up to four things, of which at most one is a digit; rarely none."""

    def make() -> Scene:
        count = draw.one((0, 1, 1, 1, 2, 2, 2, 3, 3, 4)) if draw.chance(0.5) else draw.number(1, THINGS_MAX)
        places = sorted(draw.several(range(ROWS**2), count))
        digit = draw.number(0, 2 * count) if count else -1
        # Often alike, or nothing could be counted.
        few = draw.several(SHAPES, 2)
        colors = draw.several(tuple(COLORS), 2)
        return Scene(
            tuple(
                Thing(
                    draw.one(DIGITS) if number == digit else draw.one(few),
                    draw.one(colors),
                    *divmod(place, ROWS),
                    draw.number(60, 90) / 100,
                )
                for number, place in enumerate(places)
            )
        )

    return draw.keyed(make, lambda scene: scene.key)


def picture(scene: Scene, side: int = 288) -> Image.Image:
    """The scene on white, `side` pixels a side."""
    pixels = np.full((side, side, 3), 255, np.float32)
    place = side // ROWS
    for thing in scene.things:
        alpha = _mask(thing.kind, round(thing.size * 20), place)[..., None]
        top, left = thing.row * place, thing.column * place
        part = pixels[top : top + place, left : left + place]
        part[:] = part * (1 - alpha) + np.array(COLORS[thing.color], np.float32) * alpha
    return Image.fromarray(np.round(pixels).astype(np.uint8))


@cache
def _mask(kind: str, size: int, side: int) -> np.ndarray:
    """Coverage of a thing's place, from 0 to 1; `size` in twentieths."""
    whole = side * _SUPERSAMPLED
    image = Image.new("L", (whole, whole))
    pen = ImageDraw.Draw(image)
    margin = whole * (20 - size) / 40
    low, high = margin, whole - margin
    middle = whole / 2
    if kind == "circle":
        pen.ellipse((low, low, high, high), fill=255)
    elif kind == "square":
        pen.rectangle((low, low, high, high), fill=255)
    elif kind == "triangle":
        pen.polygon([(middle, low), (high, high), (low, high)], fill=255)
    elif kind == "cross":
        arm = (high - low) / 6
        pen.rectangle((middle - arm, low, middle + arm, high), fill=255)
        pen.rectangle((low, middle - arm, high, middle + arm), fill=255)
    else:
        _draw_digit(pen, kind, low, high)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32) / 255


def _draw_digit(pen: ImageDraw.ImageDraw, kind: str, top: float, bottom: float) -> None:
    height = bottom - top
    width, thick, middle = height * 0.6, height / 6, (top + bottom) / 2
    left = middle - width / 2
    right = middle + width / 2
    boxes = (
        (left, top, right, top + thick),
        (left, top, left + thick, middle),
        (right - thick, top, right, middle),
        (left, middle - thick / 2, right, middle + thick / 2),
        (left, middle, left + thick, bottom),
        (right - thick, middle, right, bottom),
        (left, bottom - thick, right, bottom),
    )
    for box, is_lit in zip(boxes, _SEGMENTS[kind], strict=True):
        if is_lit == "1":
            pen.rectangle(box, fill=255)
