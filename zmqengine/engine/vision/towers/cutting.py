"""Cuts of a layer's work, so that a piece takes no longer than the engine allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from zmqengine.engine.vision.tower import WHOLE

ATTENTION_FLOATS = 3
"""Multiplications that attention to one other token counts as, as multiples of the width: there are two, and scores and
their softmax go through memory."""
MERGE_SHARE = 0.5
"""Merging and projecting the patches of a cell, as a part of a layer's products: in most families 4 to 8 of 12 squares
of the tower's width for each patch."""


class LayerCut(NamedTuple):
    """Tokens `start` to `end` of each tile; `patches`: those whose products in a layer take as long."""

    start: int
    end: int
    patches: int


def cuts(
    tokens: int,
    patches_max: Callable[[], int],
    *,
    tiles: int = 1,
    share: float = 1.0,
    tokens_max: int = WHOLE,
    multiple: int = 1,
) -> Iterator[LayerCut]:
    """`tokens` of each of `tiles` in parts of at most `tokens_max`, for work that is this `share` of a layer's
    products.

    `patches_max` is asked for each part, which is a `multiple` of tokens, one at least.
    """
    start = 0
    while start < tokens:
        count = min(tokens_max, int(patches_max() / (share * tiles)))
        end = min(tokens, start + max(multiple, count // multiple * multiple))
        yield LayerCut(start, end, max(1, round(share * tiles * (end - start))))
        start = end


class Filled:
    """An array of `tokens` along an axis that pieces are put into, one after the other.

    MLX writes them in place, as long as nothing else refers to `array`: a concatenation of what thousands of pieces
    made would be a long piece itself.
    """

    array: mx.array

    def __init__(self, tokens: int, axis: int = 1) -> None:
        self._tokens = tokens
        self._axis = axis

    def put(self, start: int, part: mx.array) -> None:
        """Put a piece at its first token; the first piece begins the array."""
        count = part.shape[self._axis]
        if count == self._tokens:
            self.array = part
            return
        if start == 0:
            shape = list(part.shape)
            shape[self._axis] = self._tokens
            self.array = mx.zeros(shape, part.dtype)
        self.array[(slice(None),) * self._axis + (slice(start, start + count),)] = part
