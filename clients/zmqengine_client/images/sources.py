"""An image as a program gives it, to the bytes of its file."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union, cast

from zmqengine.errors import BadRequest, TooLarge
from zmqengine_client.images.orientation import ORIENTATION, orientation

if TYPE_CHECKING:
    from PIL.Image import Image


class PilImage(Protocol):
    """The part of a `PIL.Image.Image` that tells it from other objects: Pillow need not be installed for its type."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None: ...

    def getexif(self) -> Any: ...


ImageLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, PilImage]
"""A path, a data URL, the bytes of a file, or a `PIL.Image.Image`, which is turned by its EXIF data as a file is."""

SLICE_BYTES = 256 * 1024
"""Bytes of one call that keeps Python's other threads waiting: base64 of them takes one or two milliseconds."""
FILE_BYTES_MAX = 20 * 1024 * 1024
"""Bytes of one image file: Anthropic takes 5 MB, OpenAI 20 MB until its newest models."""


def file_bytes(image: ImageLike) -> bytes:
    """The bytes of the file. Reads a path: not for what strangers send, and not for an event loop.

    Raises `BadRequest`, and `TooLarge` for a file of over `FILE_BYTES_MAX`.
    """
    if isinstance(image, str) and image[:5].lower() == "data:":
        return data_url_bytes(image)
    if isinstance(image, str) and image[:8].lower().startswith(("http://", "https://")):
        raise BadRequest("an image is a path, bytes, a data URL or a PIL image: fetch a URL yourself")
    if isinstance(image, (str, os.PathLike)):
        return _read(Path(image))
    if isinstance(image, (bytes, bytearray, memoryview)):
        return checked(bytes(image))
    if hasattr(image, "save") and hasattr(image, "getexif"):
        return _saved(cast("Image", image))
    raise BadRequest(f"an image is a path, bytes, a data URL or a PIL image, not {type(image).__name__}")


def data_url_bytes(url: str) -> bytes:
    """The bytes in a data URL. Raises `BadRequest` for one that is not base64."""
    head, comma, data = url.partition(",")
    kind = head[5:].lower()
    if not comma or not kind.endswith(";base64"):
        raise BadRequest("a data URL of an image is data:image/png;base64,... (or jpeg, webp, gif)")
    return base64_bytes(data)


def base64_bytes(data: str) -> bytes:
    """The bytes of an image in base64. Raises `BadRequest` for anything else."""
    checked_size(len(data) * 3 // 4)
    try:
        return checked(b"".join(_decoded(data)))
    except (binascii.Error, ValueError):
        raise BadRequest("the image is not valid base64") from None


def _decoded(data: str) -> Iterator[bytes]:
    """Decode base64 `data` in slices, so that other threads run in between. Raises `ValueError` if it is not base64."""
    rest, is_padded = "", False
    for start in range(0, len(data), SLICE_BYTES):
        # White space is dropped: many encoders break lines.
        text = rest + "".join(data[start : start + SLICE_BYTES].split())
        whole = len(text) // 4 * 4
        if is_padded and text:
            raise ValueError("text behind the padding")
        yield base64.b64decode(text[:whole], validate=True)
        is_padded = is_padded or text[:whole].endswith("=")
        rest = text[whole:]
    if rest:
        raise ValueError("the text is cut off")


def checked(data: bytes) -> bytes:
    """`data`, which is a file of an allowed size. Raises `BadRequest` or `TooLarge`."""
    if not data:
        raise BadRequest("the image is empty")
    checked_size(len(data))
    return data


def checked_size(size: int) -> None:
    """Raise `TooLarge` for a file of more bytes than allowed."""
    if size > FILE_BYTES_MAX:
        raise TooLarge(f"the image has {size} bytes; at most {FILE_BYTES_MAX} are taken: make it smaller")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return checked(file.read(FILE_BYTES_MAX + 1))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(f"the image {str(path)!r} cannot be read: {reason}") from None


_PNG_MODES = {
    "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB", "RGBX": "RGB", "PA": "RGBA", "RGBa": "RGBA", "La": "LA",
}  # fmt: skip
"""Modes of PIL that a PNG does not have, and their replacements."""


def _saved(image: Image) -> bytes:
    """A PIL image as a PNG file, which loses nothing that a model sees."""
    from PIL.Image import Exif

    written, exif = io.BytesIO(), Exif()
    exif[ORIENTATION] = orientation(image)
    try:
        shown = image.convert(_PNG_MODES.get(image.mode, image.mode))
        shown.save(written, "PNG", compress_level=1, exif=exif)
    except (OSError, ValueError) as error:
        raise BadRequest(f"the PIL image cannot be written as PNG: {error}") from None
    return checked(written.getvalue())
