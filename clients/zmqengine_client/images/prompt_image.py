"""The images of a prompt: sent before the insert that names them, and made again when the worker wants them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zmqengine.errors import ImageWanted, ZmqEngineError
from zmqengine.protocol.messages import ImageRef
from zmqengine_client.images.image_body import ImageBody

WANTED_MAX = 3
"""Times in a row that the images of one request are sent again, before the worker counts as too full for them."""


@dataclass(eq=False, slots=True)
class PromptImage:
    """An image of a prompt. `body` has its pixels until they are sent; `make` makes them again. `make` blocks.

    Requests of the same prompt may share it: the first one sends the pixels.
    """

    ref: ImageRef
    make: Callable[[], ImageBody]
    body: ImageBody | None = None


def no_room(images: Sequence[PromptImage]) -> ZmqEngineError:
    """The error of a worker that drops the images of a request before it starts."""
    return ImageWanted(
        f"the worker has no room for the {len(images)} images of this request: send fewer or smaller ones, or try later"
    )
