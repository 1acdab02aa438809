"""A tower that computes layer by layer: pixels of an image to its features, in pieces of bounded time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.vision.tower import WHOLE, Features
from zmqengine.engine.vision.towers.block import SCORES_BYTES_MAX, TowerBlock

PATCHES_MAX = 4096
"""Patches of tiles that are computed together. Larger products use a device no better, and a piece takes longer."""

Grid = tuple[int, int]


class Normalisation(NamedTuple):
    """Mean and deviation of red, green and blue, of pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class VisionEncoder(Protocol):
    """The layers of one family. States are [tiles, tokens, width], of tiles of one grid."""

    layers: Sequence[TowerBlock]
    width: int
    """Floats of a feature."""
    token_floats: int
    """Floats that a token takes at most at one time, its pixels included and attention scores not."""
    deep_layers: Sequence[int]
    """Layers whose states become features too, which the model adds to the states of its first layers."""

    def start(self, patches: mx.array, grid: Grid) -> mx.array:
        """States before the first layer, of normalised pixels [tiles, patches, numbers of a patch]."""
        ...

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """Keywords of the layer of a number, beside its states."""
        ...

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """Features [tiles, tokens, width] of the states after the last layer, tokens in row-major order."""
        ...

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """Features of the states after the layer at this place of `deep_layers`."""
        ...


class LayeredTower:
    """A `Tower` on an encoder of one of the families, which computes in `dtype`."""

    def __init__(
        self, encoder: VisionEncoder, normalisation: Normalisation, dtype: mx.Dtype, parameter_bytes: int
    ) -> None:
        self._encoder = encoder
        self.parameter_bytes = parameter_bytes
        self._dtype = dtype
        self._mean = mx.array(normalisation.mean, mx.float32)
        self._std = mx.array(normalisation.std, mx.float32)
        self.deep_layers = len(encoder.deep_layers)

    def begin(self, pixels: np.ndarray, grids: Sequence[Grid]) -> LayeredJob:
        """The features of an image, to be computed: `pixels` (patches, numbers of a patch) of uint8, a grid a tile."""
        return LayeredJob(self._encoder, self._groups(pixels, grids), sum(map(_patches, grids)))

    def peak_bytes(self, grids: Sequence[Grid]) -> int:
        """The most bytes that the job of an image takes, its features included."""
        size = self._dtype.size
        together = max((len(tiles) * _patches(tiles[0]) for tiles in _together(grids)), default=0)
        patches = sum(map(_patches, grids))
        features = patches * self._encoder.width * size * (1 + self.deep_layers)
        return together * self._encoder.token_floats * max(4, size) + features + 2 * SCORES_BYTES_MAX

    def _groups(self, pixels: np.ndarray, grids: Sequence[Grid]) -> Iterator[tuple[Grid, mx.array]]:
        start = 0
        for tiles in _together(grids):
            end = start + len(tiles) * _patches(tiles[0])
            # No name here holds an array while the layers of its tiles are computed.
            yield tiles[0], self._normal(pixels[start:end].reshape(len(tiles), _patches(tiles[0]), -1, 3))
            start = end

    def _normal(self, pixels: np.ndarray) -> mx.array:
        normal = (mx.array(pixels).astype(mx.float32) / 255 - self._mean) / self._std
        return normal.reshape(*normal.shape[:2], -1).astype(self._dtype)


class LayeredJob:
    """The features of one image of `patches`, computed in pieces: a layer of one or several tiles, or a part of it."""

    def __init__(self, encoder: VisionEncoder, groups: Iterator[tuple[Grid, mx.array]], patches: int) -> None:
        self._encoder = encoder
        self._patches = patches
        self._patches_max = WHOLE
        self._pieces = self._run(groups)
        self._done: list[mx.array] = []
        self._deep: list[list[mx.array]] = [[] for _ in encoder.deep_layers]

    def step(self, patches_max: int = WHOLE) -> int:
        """Compute the next piece; its patches, or 0 if it was the last."""
        self._patches_max = patches_max
        arrays, patches = next(self._pieces, ([], 0))
        mx.eval(arrays)
        return patches

    def features(self) -> Features:
        """The features of all tiles, in order."""
        found = Features(_flat(self._done), tuple(map(_flat, self._deep)))
        mx.eval(found.arrays())
        return found

    def _run(self, groups: Iterator[tuple[Grid, mx.array]]) -> Iterator[tuple[list[mx.array], int]]:
        encoder = self._encoder
        left = self._patches
        for grid, pixels in groups:
            patches = pixels.shape[0] * pixels.shape[1]
            positions = encoder.positions(grid)
            states = encoder.start(pixels, grid)
            # The states are all that the layers need.
            del pixels
            for number, layer in enumerate(encoder.layers):
                computed = layer.pieces(states, lambda: self._patches_max, **positions(number))
                states = yield from computed
                if number in encoder.deep_layers:
                    place = encoder.deep_layers.index(number)
                    self._deep[place].append(encoder.deep(states, place, grid))
                    yield [self._deep[place][-1]], patches
            self._done.append(encoder.finish(states, grid))
            left -= patches
            yield [self._done[-1]], patches if left else 0


def _together(grids: Sequence[Grid]) -> Iterator[list[Grid]]:
    """Neighbouring tiles of one grid, as many as are computed together."""
    for grid, alike in groupby(grids):
        tiles = list(alike)
        count = max(1, PATCHES_MAX // _patches(grid))
        for start in range(0, len(tiles), count):
            yield tiles[start : start + count]


def _patches(grid: Grid) -> int:
    return grid[0] * grid[1]


def _flat(parts: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
