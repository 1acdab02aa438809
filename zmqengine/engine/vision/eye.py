"""An eye: a vision tower with the text model that reads its features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import mlx.core as mx

from zmqengine.engine.vision.tower import Tower
from zmqengine.vision_card import VisionCard

Embed = Callable[[mx.array], mx.array]
"""Embeddings [rows, width, dim] of tokens [rows, width] by the text model, as its `input_embeddings` takes them: with a
norm or scale that the model applies there."""


@dataclass(frozen=True, slots=True)
class Eye:
    """A tower, the card that says how images come to it, and `embed` of the text model.

    `positions_merge`: patches a side of a cell where the text model has three positions for a token, else 0.
    """

    card: VisionCard
    tower: Tower
    embed: Embed
    positions_merge: int = 0

    def largest_patches(self, bytes_max: int) -> int:
        """The most patches of an image whose computation stays within `bytes_max`; 0 if none does."""
        low, high = 0, self.card.patches_max
        while low < high:
            middle = (low + high + 1) // 2
            if self.tower.peak_bytes(self.grids(middle)) <= bytes_max:
                low = middle
            else:
                high = middle - 1
        return low

    def grids(self, patches: int) -> list[tuple[int, int]]:
        """Grids of about `patches` patches that take the most memory: one square, or as many whole tiles."""
        card = self.card
        side = card.tile // card.patch if card.resize.startswith("tiles") else isqrt(max(1, patches))
        side = max(card.merge, side // card.merge * card.merge)
        return [(side, side)] * max(1, patches // side**2)
