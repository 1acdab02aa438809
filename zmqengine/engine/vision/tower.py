"""The contract between the engine and the vision tower of a model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

WHOLE = 1 << 30
"""More patches than an image has: a piece is a layer."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one image, in the order of its grids and cells: `main` [features, width].

    `deep` are further features of the same shape that are added to the hidden states behind the first text layers, one
    for each (deepstack); most families have none.
    """

    main: mx.array
    deep: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.main.nbytes) + sum(int(each.nbytes) for each in self.deep)

    def arrays(self) -> list[mx.array]:
        return [self.main, *self.deep]


class TowerJob(Protocol):
    """The computation of one image, in pieces."""

    def step(self, patches_max: int = WHOLE) -> int:
        """Compute the next piece, `mx.eval` included: a layer of at most about `patches_max` patches.

        Returns the number of patches, or 0 if this was the last piece. The engine runs pieces between the steps of the
        batch, as large and as many as the pace of prefill allows.
        """
        ...

    def features(self) -> Features:
        """The result, evaluated, once `step` has returned 0."""
        ...


class Tower(Protocol):
    """The tower and projector of one model. It normalises the pixels itself; weights are evaluated when it is made."""

    @property
    def parameter_bytes(self) -> int: ...

    @property
    def deep_layers(self) -> int:
        """Number of arrays in `Features.deep`."""
        ...

    def begin(self, pixels: np.ndarray, grids: Sequence[tuple[int, int]]) -> TowerJob:
        """Start an image. `pixels`: uint8 [patches, patch * patch * 3] as they are on the wire (SPEC.md, image)."""
        ...

    def peak_bytes(self, grids: Sequence[tuple[int, int]]) -> int:
        """The most bytes that a job of these grids holds at once, beside weights: an estimate from above."""
        ...
