"""A tower that computes layer by layer: pixels of an image to its features, in pieces of bounded time and memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.vision.tower import WHOLE, Features
from zmqengine.engine.vision.towers.block import SCORES_BYTES_MAX, TowerBlock
from zmqengine.engine.vision.towers.cutting import MERGE_SHARE, Filled, cuts

PATCHES_MAX = 4096
"""Patches of tiles that are computed together. Larger products use a device no better, and a piece takes longer."""

Grid = tuple[int, int]
Pieces = Generator[tuple[list[mx.array], int], None, mx.array]
"""Arrays to evaluate one after the other, with the patches that they count as; returns what they make together."""


class Normalisation(NamedTuple):
    """Mean and deviation of red, green and blue, of pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class VisionEncoder(Protocol):
    """The layers of one family. States are [tiles, tokens, width], of tiles of one grid.

    `merge`: patches a side that become one feature. `extra_tokens`: tokens before the first patch.
    """

    layers: Sequence[TowerBlock]
    merge: int
    extra_tokens: int
    width: int
    """Floats of a feature."""
    token_floats: int
    """Numbers that a token takes in a block, see `BlockShape.token_floats`."""
    deep_layers: Sequence[int]
    """Layers whose states become features too, which the model adds to the states of its first layers."""

    @property
    def patch(self) -> Callable[[mx.array], mx.array]:
        """The product that embeds normalised pixels [tiles, patches, numbers of a patch]."""
        ...

    def start(self, embedded: mx.array, grid: Grid) -> mx.array:
        """States before the first layer, of embedded patches."""
        ...

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """Keywords of the layer of a number, beside its states."""
        ...

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """Features [tiles, tokens, width] of states after the last layer, of patches in row-major order.

        `grid` is that of whole rows of cells, all or some.
        """
        ...

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """Features of the states after the layer at this place of `deep_layers`, as `finish`."""
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
        return LayeredJob(self._encoder, self._groups(pixels, grids), self._normal, sum(map(_patches, grids)))

    def peak_bytes(self, grids: Sequence[Grid]) -> int:
        """The most bytes that the job of an image takes, its features included."""
        size = self._dtype.size
        together = max((len(tiles) * _patches(tiles[0]) for tiles in _together(grids)), default=0)
        patches = sum(map(_patches, grids))
        features = patches * self._encoder.width * size * (1 + self.deep_layers)
        return together * self._encoder.token_floats * max(4, size) + features + 2 * SCORES_BYTES_MAX

    def _groups(self, pixels: np.ndarray, grids: Sequence[Grid]) -> Iterator[tuple[Grid, np.ndarray]]:
        start = 0
        for tiles in _together(grids):
            end = start + len(tiles) * _patches(tiles[0])
            yield tiles[0], pixels[start:end].reshape(len(tiles), _patches(tiles[0]), -1)
            start = end

    def _normal(self, pixels: np.ndarray) -> mx.array:
        colors = mx.array(pixels).reshape(*pixels.shape[:2], -1, 3).astype(mx.float32)
        return ((colors / 255 - self._mean) / self._std).reshape(pixels.shape).astype(self._dtype)


class LayeredJob:
    """The features of one image of `patches`, computed in pieces: a layer of one or several tiles, or a part of it."""

    def __init__(
        self,
        encoder: VisionEncoder,
        groups: Iterator[tuple[Grid, np.ndarray]],
        normal: Callable[[np.ndarray], mx.array],
        patches: int,
    ) -> None:
        self._encoder = encoder
        self._normal = normal
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
        features = Features(_flat(self._done), tuple(map(_flat, self._deep)))
        mx.eval(features.arrays())
        return features

    def _run(self, groups: Iterator[tuple[Grid, np.ndarray]]) -> Iterator[tuple[list[mx.array], int]]:
        encoder = self._encoder
        left = self._patches
        for grid, pixels in groups:
            positions = encoder.positions(grid)
            states = encoder.start((yield from self._embedded(pixels)), grid)
            for number, layer in enumerate(encoder.layers):
                computed = layer.pieces(states, lambda: self._patches_max, **positions(number))
                states = yield from computed
                if number in encoder.deep_layers:
                    place = encoder.deep_layers.index(number)
                    deep = partial(encoder.deep, place=place)
                    self._deep[place].append((yield from self._merged(deep, states, grid)))
            left -= pixels.shape[0] * pixels.shape[1]
            self._done.append((yield from self._merged(encoder.finish, states, grid)))
            if left:
                continue
            yield [self._done[-1]], 0

    def _embedded(self, pixels: np.ndarray) -> Pieces:
        """Embedded patches of some tiles."""
        tiles, tokens, numbers = pixels.shape
        share = numbers / self._encoder.layers[0].shape.floats
        embedded = Filled(tokens)
        for start, end, patches in cuts(tokens, lambda: self._patches_max, tiles=tiles, share=share):
            embedded.put(start, self._encoder.patch(self._normal(pixels[:, start:end])))
            yield [embedded.array], patches
        return embedded.array

    def _merged(self, merge: Callable[..., mx.array], states: mx.array, grid: Grid) -> Pieces:
        """Features of states by `finish` or `deep` of the encoder, some rows of cells at a time."""
        states = states[:, self._encoder.extra_tokens :]
        tiles, tokens, _ = states.shape
        columns = grid[1]
        merged = self._encoder.merge
        cells = Filled(tokens // merged**2)
        for start, end, patches in cuts(
            tokens, lambda: self._patches_max, tiles=tiles, share=MERGE_SHARE, multiple=columns * merged
        ):
            part = merge(states[:, start:end], grid=((end - start) // columns, columns))
            cells.put(start // merged**2, part)
            yield [cells.array], patches
        return cells.array


def _together(grids: Sequence[Grid]) -> Iterator[list[Grid]]:
    """Neighbouring tiles of one grid that are computed together."""
    for grid, alike in groupby(grids):
        tiles = list(alike)
        count = max(1, PATCHES_MAX // _patches(grid))
        for start in range(0, len(tiles), count):
            yield tiles[start : start + count]


def _patches(grid: Grid) -> int:
    return grid[0] * grid[1]


def _flat(parts: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
