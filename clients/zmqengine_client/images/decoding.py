"""The bytes of an image file, from anybody, to pixels.

Bounds are checked before memory is taken: the format by its first bytes, the size by the header.
"""

from __future__ import annotations

import io
import re
import struct
from typing import TYPE_CHECKING

from zmqengine.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS_MAX = 50_000_000
"""Pixels of one image: those of a phone's 50-megapixel camera. Decoded they are 150 MB."""
SCANS_MAX = 64
"""Scans of a JPEG. Each costs a pass over all pixels; progressive encoders write about ten."""
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""A marker of a JPEG that a length follows, or the end of the image."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""
_TURNS = {
    2: ("FLIP_LEFT_RIGHT",),
    3: ("ROTATE_180",),
    4: ("FLIP_TOP_BOTTOM",),
    5: ("TRANSPOSE",),
    6: ("ROTATE_270",),
    7: ("TRANSVERSE",),
    8: ("ROTATE_90",),
}
NO_PILLOW = "images need Pillow and numpy: pip install 'zmqengine[vision]'"


def decode(data: bytes) -> Image:
    """The picture in a PNG, JPEG, WebP or GIF file: RGB, turned as its EXIF data say, on white where it is transparent.

    Of an animation the first frame. Blocking: not for an event loop. Raises `BadRequest` for anything that is not such
    a file or is damaged, and `TooLarge` for one of more than `PIXELS_MAX` pixels.
    """
    format_ = _format(data)
    try:
        from PIL import Image
    except ImportError:
        raise BadRequest(NO_PILLOW) from None
    if format_ == "WEBP":
        # Pillow takes the memory for a WebP when it opens it.
        _check_size(*_webp_size(data))
    if format_ == "JPEG":
        _check_scans(data)
    try:
        with Image.open(io.BytesIO(data), formats=[format_]) as image:
            _check_size(*image.size)
            image.load()
            return _upright(_rgb(image), _orientation(image))
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


def _check_scans(data: bytes) -> None:
    """Raise `BadRequest` for a JPEG of too many scans, which takes minutes to decode. Source: ITU-T T.81, annex B."""
    at, scans = 2, 0
    while marker := _MARKER.search(data, at):
        kind, at = data[marker.start() + 1], marker.end()
        if kind == _END_OF_IMAGE:
            return
        scans += kind == _START_OF_SCAN
        if scans > SCANS_MAX:
            raise BadRequest(f"the JPEG has over {SCANS_MAX} scans: save it again")
        at += int.from_bytes(data[at : at + 2], "big")


def _rgb(image: Image) -> Image:
    from PIL import Image as Pillow

    if image.mode.startswith("I"):
        # 16 bits a pixel: Pillow would clip to the lowest 255 values.
        image = image.convert("I").point(lambda value: value * (1 / 256), "L")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Pillow.new("RGBA", clear.size, (255, 255, 255, 255))
        return Pillow.alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data are no reason to refuse a picture
        return 1


def _upright(image: Image, orientation: int) -> Image:
    from PIL import Image as Pillow

    for turn in _TURNS.get(orientation, ()):
        image = image.transpose(Pillow.Transpose[turn])
    return image
