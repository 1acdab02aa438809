"""An image file to the patches that a model takes, and to their hash.

The hash of a file that was prepared before is remembered, and so are the latest patches: an agent sends the same
screenshots with every turn.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zmqengine.vision_card import VisionCard, check_patches, image_hash
from zmqengine_client.images.decoding import decode
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.sizes import ImageLayout, Size, layout

if TYPE_CHECKING:
    from PIL.Image import Image

FILES_MAX = 4096
"""Files whose hash is remembered, some 200 bytes each."""
PIXEL_BYTES_MAX = 64 * 1024 * 1024
"""Patches that are remembered: those of some twenty images of a megapixel."""


class ImageFacts(NamedTuple):
    """Names of a prepared image: its hash, and its layout in patches and tiles."""

    hash: bytes
    grids: Sequence[tuple[int, int]]
    layout: ImageLayout


class PreparedImage(NamedTuple):
    """A prepared image: `facts`, and its patches if they had to be made."""

    facts: ImageFacts
    body: ImageBody | None


class ImagePreparation:
    """Prepares image files. It remembers the facts of `files_max` files, and up to `bytes_max` of patches.

    Safe to use from several threads. Every method is slow: not for an event loop.
    """

    def __init__(self, files_max: int = FILES_MAX, bytes_max: int = PIXEL_BYTES_MAX) -> None:
        self._files_max = files_max
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._facts: OrderedDict[bytes, ImageFacts] = OrderedDict()
        self._bodies: OrderedDict[bytes, ImageBody] = OrderedDict()
        self._bytes = 0

    def prepare(self, data: bytes, card: VisionCard, patches_max: int) -> PreparedImage:
        """The image in a file, for a worker that takes `patches_max` patches.

        Raises `BadRequest` and `TooLarge`, as `decode` does, and for an image that the worker does not take.
        """
        fitted = fitting(card, patches_max)
        key = _key(data, fitted)
        with self._lock:
            facts = self._facts.get(key)
            if facts is not None:
                self._facts.move_to_end(key)
                return PreparedImage(facts, None)
        facts, body = _made(data, fitted, patches_max)
        self._remember(key, facts, body)
        return PreparedImage(facts, body)

    def body(self, data: bytes, card: VisionCard, patches_max: int) -> ImageBody:
        """The patches of an image that was prepared before, made again if they are not remembered."""
        fitted = fitting(card, patches_max)
        key = _key(data, fitted)
        with self._lock:
            cached = self._bodies.get(key)
        if cached is not None:
            return ImageBody.of(cached.pixels)
        facts, body = _made(data, fitted, patches_max)
        self._remember(key, facts, body)
        return body

    def _remember(self, key: bytes, facts: ImageFacts, body: ImageBody) -> None:
        with self._lock:
            self._facts[key] = facts
            while len(self._facts) > self._files_max:
                self._facts.popitem(last=False)
            if key not in self._bodies:
                self._bodies[key] = body
                self._bytes += body.nbytes
            while self._bytes > self._bytes_max:
                self._bytes -= self._bodies.popitem(last=False)[1].nbytes


IMAGES = ImagePreparation()
"""The preparation that all clients of a process share."""


def fitting(card: VisionCard, patches_max: int) -> VisionCard:
    """The card with bounds that `patches_max` keeps, where its rule can do with fewer patches."""
    if card.resize in ("area", "cells"):
        most = patches_max * card.patch**2
        return msgspec.structs.replace(card, pixels_max=min(card.pixels_max or most, most))
    if card.resize == "longest":
        cell = card.patch * card.merge
        side = int(patches_max**0.5) // card.merge * cell
        return msgspec.structs.replace(card, side_max=max(cell, min(card.side_max, side)))
    return card


def _key(data: bytes, card: VisionCard) -> bytes:
    return hashlib.blake2b(
        data, digest_size=32, key=hashlib.blake2b(msgspec.msgpack.encode(card)).digest()
    ).digest()


def _made(data: bytes, card: VisionCard, patches_max: int) -> tuple[ImageFacts, ImageBody]:
    image = decode(data)
    arranged = layout(*image.size, card)
    grids = arranged.grids(card)
    check_patches(grids, card, patches_max)
    body = ImageBody(card.patches(grids) * card.patch_bytes)
    room = body.pixels
    for tile in _tiles(image, arranged, card):
        room = room[_cut(tile, card.patch, room) :]
    return ImageFacts(image_hash(card.kind, grids, body.pixels), grids, arranged), body


def _tiles(image: Image, arranged: ImageLayout, card: VisionCard) -> list[Image]:
    resized = image
    for size in arranged.sizes:
        resized = _resized(resized, size, card)
    width, height = resized.width // arranged.columns, resized.height // arranged.rows
    tiles = [
        resized.crop((left, top, left + width, top + height))
        for top in range(0, resized.height, height)
        for left in range(0, resized.width, width)
    ]
    if arranged.overview is not None:
        whole = image if arranged.overview_of_original else resized
        tiles.append(_resized(whole, arranged.overview, card))
    return tiles


def _resized(image: Image, size: Size, card: VisionCard) -> Image:
    from PIL import Image as Pillow

    return image.resize(size, Pillow.Resampling[card.filter.upper()])


def _cut(tile: Image, patch: int, room: memoryview) -> int:
    """Write the patches of a tile into `room`, row by row: of each its pixels, row by row. Returns their bytes."""
    import numpy as np

    pixels = np.asarray(tile)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches = np.frombuffer(room[: pixels.size], np.uint8).reshape(rows, columns, patch, patch, 3)
    patches[:] = pixels.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    return pixels.size
