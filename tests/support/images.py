"""Images as a worker gets them: pixels, spans and expected tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqengine.engine.interface import RowImage
from zmqengine.protocol.messages import Image, ImageRef
from zmqengine.vision_card import VisionCard, image_hash


@dataclass(frozen=True)
class Picture:
    """An image of random pixels for a model with `card`; `change` makes another one that differs in one byte."""

    card: VisionCard
    grids: Sequence[tuple[int, int]] = ((4, 6),)
    seed: int = 0
    change: int | None = None
    pixels: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pixels = bytearray(
            random.Random(self.seed).randbytes(self.card.patches(self.grids) * self.card.patch_bytes)
        )
        if self.change is not None:
            pixels[self.change] ^= 1
        object.__setattr__(self, "pixels", bytes(pixels))

    @property
    def hash(self) -> bytes:
        return image_hash(self.card.kind, self.grids, self.pixels)

    @property
    def ids(self) -> list[int]:
        """The tokens that stand for it in a prompt."""
        return [*self.card.begin, *[self.card.token] * self.card.features(self.grids), *self.card.end]

    def put(self, epoch: bytes, call: int = 1, scope: str | None = None) -> Image:
        """The command that sends it."""
        return Image(call, epoch, self.hash, list(self.grids), self.pixels, scope)  # type: ignore[arg-type]

    def ref(self, at: int) -> ImageRef:
        """Its row of an insert."""
        return ImageRef(self.hash, at, len(self.ids), list(self.grids))

    def row_image(self, at: int) -> RowImage:
        """The image of a row, for an engine."""
        return RowImage(self.hash, at, len(self.ids), self.grids, self.pixels)


def prompt_of(*parts: Sequence[int] | Picture) -> tuple[list[int], list[tuple[Picture, int]]]:
    """The prompt of texts and pictures, and where each picture begins."""
    prompt: list[int] = []
    places: list[tuple[Picture, int]] = []
    for part in parts:
        if isinstance(part, Picture):
            places.append((part, len(prompt)))
            prompt += part.ids
        else:
            prompt += part
    return prompt, places
