"""Sizes and tiles of an image, by the resize rules of the vision card in SPEC.md. No pixel is touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, sqrt
from typing import NamedTuple

from zmqengine.errors import BadRequest
from zmqengine.vision_card import VisionCard

Size = tuple[int, int]
"""Width and height in pixels."""

RATIO_MAX = 200
"""Longest side of an image over its shortest; Qwen's processor, the strictest, refuses more."""


class ImageLayout(NamedTuple):
    """Preparation of one image.

    It is resampled to each of `sizes` after the other, then cut into `rows` by `columns` tiles. With an `overview`
    the whole image follows at that size: resampled from the original, or from the last of `sizes`.
    """

    sizes: Sequence[Size]
    rows: int = 1
    columns: int = 1
    overview: Size | None = None
    overview_of_original: bool = True

    def grids(self, card: VisionCard) -> list[tuple[int, int]]:
        """Rows and columns in patches of each tile, the overview last."""
        width, height = self.sizes[-1]
        tile = (height // self.rows // card.patch, width // self.columns // card.patch)
        grids = [tile] * (self.rows * self.columns)
        if self.overview is not None:
            grids.append((self.overview[1] // card.patch, self.overview[0] // card.patch))
        return grids


def layout(width: int, height: int, card: VisionCard) -> ImageLayout:
    """The layout of an image of this size. Raises `BadRequest` for one that is too narrow for any model."""
    if max(width, height) > RATIO_MAX * min(width, height):
        raise BadRequest(
            f"an image of {width} x {height} pixels is too narrow: one side is over {RATIO_MAX} times the other"
        )
    return _RULES[card.resize](width, height, card)


def _area(width: int, height: int, card: VisionCard) -> ImageLayout:
    return ImageLayout([_area_size(width, height, card)])


def _area_size(width: int, height: int, card: VisionCard) -> Size:
    cell = card.patch * card.merge
    across, down = _rounded(width, cell), _rounded(height, cell)
    if card.pixels_max and across * down > card.pixels_max:
        scale = sqrt(width * height / card.pixels_max)
        across = max(cell, floor(width / scale / cell) * cell)
        down = max(cell, floor(height / scale / cell) * cell)
    elif across * down < card.pixels_min:
        scale = sqrt(card.pixels_min / (width * height))
        across, down = ceil(width * scale / cell) * cell, ceil(height * scale / cell) * cell
    return across, down


def _cells(width: int, height: int, card: VisionCard) -> ImageLayout:
    cell = card.patch * card.merge
    least, most = max(1, ceil(card.pixels_min / cell**2)), card.pixels_max // cell**2
    rows, columns = height / cell, width / cell
    ratio = columns / rows
    bound = most if rows * columns > most else least if rows * columns < least else None
    if bound is not None:
        rows = sqrt(bound / ratio)
        columns = rows * ratio
    near = itertools.product(sorted({floor(rows), ceil(rows)}), sorted({floor(columns), ceil(columns)}))
    grids = [(down, across) for down, across in near if down and across and least <= down * across <= most]
    if grids:
        down, across = min(
            grids, key=lambda grid: (abs(grid[0] / grid[1] - height / width), grid[0] * grid[1])
        )
    else:
        down, across = _nearest_grid(rows, columns, least, most)
    return ImageLayout([(across * cell, down * cell)])


def _nearest_grid(rows: float, columns: float, least: int, most: int) -> tuple[int, int]:
    """The grid of `least` to `most` cells that is nearest to `rows` by `columns`, of equals the one of fewest rows."""
    best, distance = (1, 1), float("inf")
    for down in range(1, most + 1):
        low, high = ceil(least / down), most // down
        if low <= high:
            across = min(max(columns, low), high)
            found = (down - rows) ** 2 + (across - columns) ** 2
            if found < distance:
                best, distance = (down, int(across)), found
    return best


def _longest(width: int, height: int, card: VisionCard) -> ImageLayout:
    cell = card.patch * card.merge
    ratio = max(width, height) / card.side_max
    if ratio > 1:
        width, height = max(1, floor(width / ratio)), max(1, floor(height / ratio))
    return ImageLayout([(_up(width, cell), _up(height, cell))])


def _fixed(width: int, height: int, card: VisionCard) -> ImageLayout:
    return ImageLayout([(card.tile, card.tile)])


def _tiles(width: int, height: int, card: VisionCard) -> ImageLayout:
    tile = card.tile
    first = _to_longest(width, height, card.side_max)
    if card.tiles_max == 1:
        return ImageLayout([first, (tile, tile)])
    ratio = first[0] / first[1]
    if first[0] >= first[1]:
        across = _up(first[0], tile)
        down = _up(int(across / ratio), tile)
    else:
        down = _up(first[1], tile)
        across = _up(int(down * ratio), tile)
    sizes = [first, (across, down)]
    if across <= tile and down <= tile:
        return ImageLayout(sizes)
    overview = (tile, tile) if card.overview else None
    return ImageLayout(sizes, down // tile, across // tile, overview, overview_of_original=False)


def _to_longest(width: int, height: int, side: int) -> Size:
    """The size whose longest side is `side`; the other one is even."""
    ratio = width / height
    if width >= height:
        other = int(side / ratio)
        return side, max(1, other + other % 2)
    other = int(side * ratio)
    return max(1, other + other % 2), side


def _tiles_ratio(width: int, height: int, card: VisionCard) -> ImageLayout:
    return _split(width, height, card, (card.tile, card.tile))


def _tiles_area(width: int, height: int, card: VisionCard) -> ImageLayout:
    cell = card.patch * card.merge
    if _rounded(width, cell) * _rounded(height, cell) <= card.pixels_split:
        return _area(width, height, card)
    return _split(width, height, card, _area_size(width, height, card))


def _split(width: int, height: int, card: VisionCard, overview: Size) -> ImageLayout:
    columns, rows = _nearest_ratio(width, height, card)
    size = (columns * card.tile, rows * card.tile)
    has_overview = card.overview and rows * columns > 1
    return ImageLayout([size], rows, columns, overview if has_overview else None)


def _nearest_ratio(width: int, height: int, card: VisionCard) -> tuple[int, int]:
    """Columns and rows of the tiles whose ratio is nearest to that of the image."""
    wanted, best, distance = width / height, (1, 1), float("inf")
    most = card.tiles_max
    pairs = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    for columns, rows in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0])):
        if columns * rows < card.tiles_min:
            continue
        found = abs(wanted - columns / rows)
        larger = width * height > 0.5 * card.tile**2 * columns * rows
        if found < distance or (found == distance and larger):
            best, distance = (columns, rows), found
    return best


def _rounded(side: int, cell: int) -> int:
    return max(cell, round(side / cell) * cell)


def _up(side: int, unit: int) -> int:
    return ceil(side / unit) * unit


_RULES: Mapping[str, Callable[[int, int, VisionCard], ImageLayout]] = {
    "area": _area,
    "cells": _cells,
    "longest": _longest,
    "fixed": _fixed,
    "tiles": _tiles,
    "tiles_ratio": _tiles_ratio,
    "tiles_area": _tiles_area,
}
