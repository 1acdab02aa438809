"""The way a camera was held, as the EXIF data of a picture say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
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


def orientation(image: Image) -> int:
    """The number that stands for it; 1 is upright, and what a picture without such data is."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data are no reason to refuse a picture
        return 1


def upright(image: Image, held: int) -> Image:
    """The picture turned from this orientation."""
    from PIL import Image as Pillow

    for turn in _TURNS.get(held, ()):
        image = image.transpose(Pillow.Transpose[turn])
    return image
