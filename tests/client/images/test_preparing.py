"""Memory of prepared images that are kept."""

from __future__ import annotations

import io
import tracemalloc

from PIL import Image

from zmqengine.engine.fake.fake_engine import FAKE_CARD
from zmqengine_client.images.preparing import ImagePreparation

BYTES_MAX = 256 * 1024


def tiny(number: int) -> bytes:
    """The file of an image of one patch group, unlike those of other numbers."""
    written = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 0)).save(written, "PNG")
    return written.getvalue()


def test_patches_of_tiny_images_stay_within_the_bound() -> None:
    """The room for the rest of its message, 4 KiB, is in the memory of each: of these, twenty times their pixels."""
    images = ImagePreparation(files_max=1, bytes_max=BYTES_MAX)
    files = [tiny(number) for number in range(400)]
    images.prepare(files[0], FAKE_CARD, 1024)
    tracemalloc.start()
    try:
        for file in files:
            images.prepare(file, FAKE_CARD, 1024)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Beside the patches are Python's objects around them.
    assert BYTES_MAX / 2 < held < 1.5 * BYTES_MAX
