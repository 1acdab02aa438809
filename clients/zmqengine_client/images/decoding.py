"""The bytes of an image file, from anybody, to pixels.

Bounds are checked before memory is taken: the format by its first bytes, the size by the header.
"""

from __future__ import annotations

import io
import re
import struct
from typing import TYPE_CHECKING

from zmqengine.errors import BadRequest, TooLarge
from zmqengine_client.images.orientation import orientation, upright
from zmqengine_client.images.sources import SLICE_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS_MAX = 50_000_000
"""Pixels of one image: those of a phone's 50-megapixel camera. Decoded they are 150 MB."""
SCANS_MAX = 64
"""Scans of a JPEG. Each costs a pass over all pixels; progressive encoders write about ten."""
PARTS_MAX = 1024
"""Segments of a JPEG, or chunks of a PNG beside its pixels: Pillow reads each in Python, and joins some to earlier
ones. A color profile has up to 255."""
PIXEL_CHUNKS_MAX = 64 * 1024
"""Chunks of pixels in a PNG; encoders write some kilobytes in each."""
GAP_BYTES_MAX = 4096
"""Bytes between two segments of a JPEG: fill, which Pillow reads one by one."""
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""A marker of a JPEG that a length follows, or the end of the image."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
NO_PILLOW = "images need Pillow and numpy: pip install 'zmqengine[vision]'"


def decode(data: bytes) -> Image:
    """The picture in a PNG, JPEG, WebP or GIF file: RGB, turned as its EXIF data say, on white where it is transparent.

    Bytes behind the image are not read. 16 bits a color are scaled to 8, and inks (CMYK) mixed as Pillow does, without
    their color profile: so do the image processors that models are trained with.
    Blocking: not for an event loop. Raises `BadRequest` for anything that is not such a file or is damaged, and for an
    animation, and `TooLarge` for one of more than `PIXELS_MAX` pixels.
    """
    format_ = _format(data)
    try:
        import numpy  # noqa: F401 - patches are cut with it
        from PIL import Image
    except ImportError:
        raise BadRequest(NO_PILLOW) from None
    if format_ == "WEBP":
        # Pillow takes the memory for a WebP when it opens it.
        _check_size(*_webp_size(data))
    if format_ == "JPEG":
        _check_segments(data)
    if format_ == "PNG":
        _check_chunks(data)
    try:
        with Image.open(io.BytesIO(data), formats=[format_]) as image:
            _check_size(*image.size)
            # Several pictures in a JPEG are views of one, such as a camera's depths: its first is the picture.
            if format_ != "JPEG" and getattr(image, "is_animated", False):
                raise BadRequest(
                    f"the {format_} is an animation: send the frame that is meant, as a PNG or JPEG"
                )
            image.load()
            bits = data[24] if format_ == "PNG" else 8
            if image.mode == "L" and bits in (2, 4) and "transparency" in image.info:
                # The pixels have 8 bits by now, and the grey that is transparent those of the file.
                image.info["transparency"] *= 255 // (2**bits - 1)
            return upright(_rgb(image), orientation(image))
    except (BadRequest, TooLarge):
        raise
    except Exception as error:  # noqa: BLE001 - on damaged files Pillow raises whatever its parsers do
        raise BadRequest(
            f"the {format_} image is damaged: {str(error)[:200] or type(error).__name__}"
        ) from None


def _format(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    raise BadRequest(f"the image is none of {', '.join(_FORMATS)}, by its first bytes: convert it")


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadRequest("the image has no pixels")
    if width * height > PIXELS_MAX:
        raise TooLarge(
            f"the image has {width} x {height} pixels; at most {PIXELS_MAX} are taken: make it smaller"
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the header of a WebP file. Source: RFC 9649."""
    kind = data[12:16]
    try:
        if kind == b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        if kind == b"VP8L" and data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    except (struct.error, IndexError):
        pass
    raise BadRequest("the WEBP image is damaged: it has no header")


def _check_segments(data: bytes) -> None:
    """Raise `BadRequest` for a JPEG that takes minutes to read. Source: ITU-T T.81, annex B."""
    at, segments, scans = 2, 0, 0
    while marker := _next_marker(data, at):
        kind, gap_bytes, at = data[marker.start() + 1], marker.start() - at, marker.end()
        if kind == _END_OF_IMAGE:
            return
        segments += 1
        if segments > PARTS_MAX or (not scans and gap_bytes > GAP_BYTES_MAX):
            raise _slow("JPEG", "segments", PARTS_MAX)
        scans += kind == _START_OF_SCAN
        if scans > SCANS_MAX:
            raise _slow("JPEG", "scans", SCANS_MAX)
        at += int.from_bytes(data[at : at + 2], "big")


def _next_marker(data: bytes, at: int) -> re.Match[bytes] | None:
    """The next marker of a JPEG, searched in slices, between which other threads run."""
    for start in range(at, len(data), SLICE_BYTES):
        # A marker has two bytes.
        if marker := _MARKER.search(data, start, start + SLICE_BYTES + 1):
            return marker
    return None


def _check_chunks(data: bytes) -> None:
    """Raise `BadRequest` for a PNG that takes minutes to read. Source: RFC 2083, section 3."""
    at, chunks, pixel_chunks = 8, 0, 0
    while (kind := data[at + 4 : at + 8]) and kind != b"IEND":
        is_pixels = kind == b"IDAT"
        chunks += not is_pixels
        pixel_chunks += is_pixels
        if chunks > PARTS_MAX or pixel_chunks > PIXEL_CHUNKS_MAX:
            raise _slow("PNG", "chunks", PARTS_MAX)
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _slow(format_: str, parts: str, most: int) -> BadRequest:
    return BadRequest(
        f"the {format_} has over {most} {parts}: save it again, without anything beside its picture"
    )


def _rgb(image: Image) -> Image:
    from PIL import Image as Pillow

    if image.mode.startswith("I"):
        return _grey(image)
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > 255:
        # The color that is transparent has 16 bits, and the pixels of a mode RGB have 8.
        image.info["transparency"] = tuple(number >> 8 for number in key)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Pillow.new("RGB", clear.size, (255, 255, 255))
        white.paste(clear, mask=clear)
        return white
    return image.convert("RGB")


def _grey(image: Image) -> Image:
    """A grey picture of 16 bits a pixel, of which Pillow would clip all but the lowest 255 values."""
    import numpy as np
    from PIL import Image as Pillow

    deep = np.asarray(image.convert("I"))
    grey = (deep >> 8).astype(np.uint8)
    grey[deep == image.info.get("transparency", -1)] = 255
    return Pillow.fromarray(grey).convert("RGB")
