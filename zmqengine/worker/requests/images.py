"""Images that front-ends sent: pixels by scope and hash, within a bound.

Pixels stay where the socket received them, and a thread computes their hash: the actor touches no byte of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from zmqengine.engine.interface import RowImage
from zmqengine.errors import BadRequest, ImageWanted, NeverFits, Overloaded
from zmqengine.protocol.messages import Image, ImageRef
from zmqengine.vision_card import VisionCard, check_patches, image_hash

Name = tuple[str, bytes]
"""Scope and hash."""
SETTLED_MAX = 64
"""Maximum images hashed at a time: the maximum of a request."""


class ImageArrives(Exception):
    """The hash of an image that a command sends or names is being computed: the command waits for `settled`."""

    def __init__(self, name: Name) -> None:
        super().__init__(name)
        self.name = name


class SettledImage(NamedTuple):
    """An image whose hash has become known: it is held, or the one that it was sent with is wrong."""

    name: Name
    error: BadRequest | None


@dataclass(slots=True)
class _Held:
    pixels: memoryview
    grids: list[tuple[int, int]]
    users: int = 0
    """Requests that have not ended and need it."""


class ImageStore:
    """Pixels of images, `bytes_max` together. Those that no request needs go when others need the room, the least
    recently used first.

    An image is found only in the scope that it was sent for: who knows a hash has not seen the image. `wake` is called
    from a thread when a hash is known.
    """

    def __init__(
        self, card: VisionCard, *, bytes_max: int, patches_max: int, wake: Callable[[], None]
    ) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._card = card
        self._patches_max = patches_max
        self._held: OrderedDict[Name, _Held] = OrderedDict()
        # Images in the order in which their hashes are computed, in room that is theirs already.
        self._arriving: dict[Name, tuple[Image, Future[bytes]]] = {}
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash of an image")
        self._wake = wake

    def __len__(self) -> int:
        return len(self._held)

    def put(self, image: Image, scope: str, retry_after_ms: int) -> None:
        """Keep an image.

        Raises `ImageArrives` until its hash is known, `BadRequest` for grids that are not those of the pixels, and
        `Overloaded` without room.
        """
        card, size = self._card, len(image.pixels)
        card.features(image.grids)
        check_patches(image.grids, card, self._patches_max)
        expected = card.patches(image.grids) * card.patch_bytes
        if size != expected:
            raise BadRequest(f"pixels: {size} bytes, the grids have {expected}")
        name = (scope, image.hash)
        # The contents of one that is held are known by its hash.
        if name in self._held:
            self._held.move_to_end(name)
            return
        if name not in self._arriving:
            if not self._make_room(size):
                raise Overloaded(
                    f"images of requests that have not ended take {self.bytes} of the {self.bytes_max} bytes for "
                    f"images, and this one has {size}",
                    retry_after_ms=retry_after_ms,
                )
            self.bytes += size
            digest = self._hashing.submit(image_hash, card.kind, image.grids, image.pixels)
            self._arriving[name] = (image, digest)
            digest.add_done_callback(lambda _: self._wake())
        raise ImageArrives(name)

    def settled(self) -> list[SettledImage]:
        """Images whose hash has become known since the last call; those without an error are held."""
        settled_images = []
        for name, (image, digest) in list(islice(self._arriving.items(), SETTLED_MAX)):
            if not digest.done():
                break
            del self._arriving[name]
            error = None
            if digest.result() == image.hash:
                self._held[name] = _Held(image.pixels, image.grids)
            else:
                self.bytes -= len(image.pixels)
                error = BadRequest(
                    f"hash: it is not that of kind {self._card.kind!r}, the grids and the pixels"
                )
            settled_images.append(SettledImage(name, error))
        return settled_images

    def close(self) -> None:
        """Compute no further hash."""
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def take(self, images: Sequence[ImageRef], scope: str) -> list[RowImage]:
        """The images of a request, held until `release`. Raises `ImageWanted` with the missing ones.

        Raises `ImageArrives` while the hash of one is not known, and `NeverFits` for images that are too many to be
        held at once.
        """
        names = {image.hash: (scope, image.hash) for image in images}
        patches = sum(self._card.patches(grids) for grids in {one.hash: one.grids for one in images}.values())
        if (bytes_ := patches * self._card.patch_bytes) > self.bytes_max:
            raise NeverFits(
                f"images: they have {bytes_} bytes of pixels, the worker holds {self.bytes_max}: send fewer or smaller "
                "ones, or raise --memory-limit"
            )
        missing = {hash_: name for hash_, name in names.items() if name not in self._held}
        wanted = [hash_ for hash_, name in missing.items() if name not in self._arriving]
        if wanted:
            raise ImageWanted(f"images: {len(wanted)} of {len(names)} are not held here: send them", wanted)
        for name in missing.values():
            raise ImageArrives(name)
        rows = []
        for image in images:
            held = self._held[scope, image.hash]
            if [tuple(grid) for grid in image.grids] != [tuple(grid) for grid in held.grids]:
                raise BadRequest(f"images: the image {image.hash.hex()} has other grids")
            rows.append(RowImage(image.hash, image.at, image.tokens, image.grids, held.pixels))
        for name in names.values():
            self._held[name].users += 1
            self._held.move_to_end(name)
        return rows

    def release(self, images: Sequence[RowImage], scope: str) -> None:
        """A request that took these images has ended."""
        for hash_ in {image.hash for image in images}:
            self._held[scope, hash_].users -= 1

    def _make_room(self, size: int) -> bool:
        if self.bytes + size > self.bytes_max:
            for name in [name for name, held in self._held.items() if not held.users]:
                self.bytes -= len(self._held.pop(name).pixels)
                if self.bytes + size <= self.bytes_max:
                    break
        return self.bytes + size <= self.bytes_max
