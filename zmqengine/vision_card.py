"""Vision card: how a front-end prepares an image, and the rules that both sides check an image by.

A front-end in another language follows SPEC.md, which has the same rules in words.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from zmqengine.errors import BadRequest
from zmqengine.sampling_params import TokenId

HASH_BYTES = 16
SIDE_PATCHES_MAX = 4096
TILES_MAX = 256
"""Grids of one image; the largest known model splits into 13."""

ImageHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Patches = Annotated[int, Meta(ge=1, le=SIDE_PATCHES_MAX)]
Grid = tuple[Patches, Patches]
Grids = Annotated[list[Grid], Meta(min_length=1, max_length=TILES_MAX)]
Pixels = Annotated[int, Meta(ge=0)]
Ids = Annotated[list[TokenId], Meta(max_length=64)]

ResizeRule = Literal["area", "cells", "longest", "fixed", "tiles", "tiles_ratio", "tiles_area"]
ResizeFilter = Literal["bilinear", "bicubic", "lanczos"]
_TILES_ALONE: frozenset[ResizeRule] = frozenset(("fixed", "tiles", "tiles_ratio"))
"""Rules whose grids all have the size of a tile; a tower may have a table of positions for it."""


class VisionCard(Struct, frozen=True, omit_defaults=True):
    """The preparation of an image for one model: its size in patches, and the tokens that stand for it.

    `patch` is pixels a side, `merge` patches a side that become one feature: a *cell* has `patch * merge` pixels a
    side. `resize` names the rule for the size; the numbers are its parameters, 0 where it has none.
    `placeholder` is the id that the chat template writes once for an image, `token` the id of each feature.
    """

    kind: str
    patch: Annotated[int, Meta(ge=1, le=256)]
    merge: Annotated[int, Meta(ge=1, le=64)]
    resize: ResizeRule
    placeholder: TokenId
    token: TokenId
    filter: ResizeFilter = "bicubic"
    pixels_min: Pixels = 0
    pixels_max: Pixels = 0
    side_max: Pixels = 0
    """Pixels of the longest side."""
    tile: Pixels = 0
    """Pixels a side of a tile, or of the whole image where `resize` is `fixed`."""
    tiles_min: Pixels = 0
    tiles_max: Pixels = 0
    pixels_split: Pixels = 0
    """A larger image is split, where `resize` is `tiles_area`."""
    overview: bool = False
    """Whether the whole image follows its tiles, at the size of one."""
    begin: Ids = []
    """Before the first feature."""
    end: Ids = []
    """After the last feature."""
    line_end: Ids = []
    """Between two rows of features of one grid."""
    row_end: Ids = []
    """Between two rows of tiles."""
    tile_begin: list[list[Ids]] = []
    """Before the features of a tile, by its row and column."""
    overview_begin: Ids = []
    """Before the features of the overview, where there are tiles."""
    single_begin: Ids = []
    """Before the features of an image that is not split."""

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch: red, green and blue of each pixel."""
        return 3 * self.patch**2

    def patches(self, grids: Sequence[tuple[int, int]]) -> int:
        """Patches of an image."""
        return sum(rows * columns for rows, columns in grids)

    @property
    def patches_max(self) -> int:
        """Patches of the largest image that the rule makes."""
        cell = self.patch * self.merge
        match self.resize:
            case "area" | "cells":
                pixels = self.pixels_max
            case "longest":
                pixels = (-(-self.side_max // cell) * cell) ** 2
            case "fixed":
                pixels = self.tile**2
            case "tiles":
                pixels = (max(1, -(-self.side_max // self.tile)) ** 2 + 1) * self.tile**2
            case _:
                pixels = self.tiles_max * self.tile**2 + max(self.tile**2, self.pixels_max)
        return pixels // self.patch**2

    def features(self, grids: Sequence[tuple[int, int]]) -> int:
        """Features of an image, each the embedding of a `token`. Raises `BadRequest` for a grid of no whole cells."""
        if any(rows % self.merge or columns % self.merge for rows, columns in grids):
            raise BadRequest(f"images: rows and columns of a grid must be multiples of {self.merge} patches")
        return self.patches(grids) // self.merge**2


def image_hash(kind: str, grids: Sequence[tuple[int, int]], pixels: bytes | memoryview) -> bytes:
    """Name of an image by its contents, as SPEC.md defines it."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    name = kind.encode()
    digest.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(grids)))
    for rows, columns in grids:
        digest.update(struct.pack("<II", rows, columns))
    digest.update(pixels)
    return digest.digest()


class ImageSpan(Protocol):
    """An image in a prompt: `prompt[at : at + tokens]` has its features and the tokens between them."""

    @property
    def hash(self) -> bytes: ...
    @property
    def at(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def grids(self) -> Sequence[tuple[int, int]]: ...


class ImageLimits(Protocol):
    """Limits of the worker that images are checked against."""

    @property
    def images_max(self) -> int: ...
    @property
    def image_patches_max(self) -> int: ...


def check_images(
    prompt: Sequence[int], images: Sequence[ImageSpan], card: VisionCard, limits: ImageLimits
) -> None:
    """Raise `BadRequest`, naming the image, for one that does not fit its prompt, its grids or the worker's limits."""
    if len(images) > limits.images_max:
        raise BadRequest(f"images: {len(images)}, the worker takes {limits.images_max} in one request")
    end = 0
    for index, image in enumerate(images):
        at, tokens = image.at, image.tokens
        if at < end or at + tokens > len(prompt):
            raise BadRequest(
                f"images: image {index} has tokens {at} to {at + tokens}: spans are in order, apart, and within the "
                f"prompt of {len(prompt)} tokens"
            )
        if at + tokens == len(prompt) and prompt[-1] == card.token:
            raise BadRequest(f"images: image {index} ends the prompt with a feature: a token has to follow")
        end = at + tokens
        check_patches(image.grids, card, limits.image_patches_max)
        features, found = card.features(image.grids), list(prompt[at:end]).count(card.token)
        if found != features:
            raise BadRequest(
                f"images: image {index} has {found} tokens {card.token} in its span, its grids have {features} features"
            )


def check_patches(grids: Sequence[tuple[int, int]], card: VisionCard, patches_max: int) -> None:
    """Raise `BadRequest` for grids that the card's rule never makes, and for an image that is larger than the worker
    takes, with the size that it takes."""
    side = card.tile // card.patch
    if card.resize in _TILES_ALONE and any(tuple(grid) != (side, side) for grid in grids):
        raise BadRequest(f"images: grids of {card.kind} are tiles of {side} x {side} patches, all of them")
    patches = card.patches(grids)
    if patches > patches_max:
        raise BadRequest(
            f"images: an image of {patches} patches of {card.patch} x {card.patch} pixels, the worker takes "
            f"{patches_max} ({patches_max * card.patch**2} pixels): make it smaller"
        )
