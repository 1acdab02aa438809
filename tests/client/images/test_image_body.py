"""The message of an image, made in the memory of its pixels."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from zmqengine.protocol.codec import command_decoder
from zmqengine.protocol.messages import Image
from zmqengine.vision_card import TILES_MAX
from zmqengine_client.images.image_body import ImageBody


@pytest.mark.parametrize("cache_scope", [None, "session"])
@pytest.mark.parametrize("grids", [[(2, 3)], [(4096, 4096)] * TILES_MAX])
@pytest.mark.parametrize("size", [1, 70_000])
def test_the_message_of_an_image_is_around_its_pixels(
    size: int, grids: list[tuple[int, int]], cache_scope: str | None
) -> None:
    """The largest head fits in front of them, and no pixel is copied."""
    pixels = np.random.default_rng(0).bytes(size)
    body = ImageBody.of(pixels)
    frames = body.frames(1 << 62, b"8 bytes.", b"h" * 16, grids, cache_scope)  # type: ignore[arg-type]
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), np.frombuffer(body.pixels, np.uint8))
    image = command_decoder().decode(frames)
    expected = Image(1 << 62, b"8 bytes.", b"h" * 16, grids, memoryview(pixels), cache_scope)  # type: ignore[arg-type]
    assert msgspec.structs.asdict(image) == msgspec.structs.asdict(expected)
