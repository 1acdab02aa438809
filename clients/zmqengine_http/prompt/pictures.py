"""Images of a request: marks in the texts of its messages, until a chat template is to write their places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from zmqengine_client.errors import BadRequest, TooLarge
from zmqengine_client.images.prompts import ReadyImage, ready_image
from zmqengine_client.images.sources import base64_bytes, data_url_bytes
from zmqengine_client.text.chats.image_marks import image_mark
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.serving.fetching import THREADS, ImageFetching
from zmqengine_http.workers.worker import Model

_NO_DATA = "an image is a data URL, such as data:image/png;base64,..."


class Picture(NamedTuple):
    """An image as sent: a data URL, base64 or a URL, and its field for refusals. `fetched`: the bytes at the URL.

    `ready`: the image for the prompt, once it is prepared.
    """

    data: str
    where: str
    fetched: bytes | None = None
    ready: ReadyImage | None = None

    @property
    def is_url(self) -> bool:
        """Whether it has to be fetched."""
        return self.data[:8].lower().startswith(("http://", "https://"))

    def file(self) -> bytes:
        """The bytes of its file. Slow for a long one: not for an event loop. Raises a 400 that names the field."""
        if self.is_url and self.fetched is None:
            raise image_refusal(
                self.where,
                "this server fetches no URLs: send the image as a data URL, or start it with --image-urls",
            )
        if self.fetched is not None:
            return self.fetched
        is_data = self.data[:5].lower() == "data:"
        if not is_data and ":" in self.data[:64]:
            raise image_refusal(self.where, _NO_DATA)
        try:
            return data_url_bytes(self.data) if is_data else base64_bytes(self.data)
        except (BadRequest, TooLarge) as error:
            raise image_refusal(self.where, error.message) from None


def prepared(picture: Picture, model: Model) -> Picture:
    """The image, ready for a prompt of this model. Blocking. Raises a 400 that names the field."""
    try:
        ready = ready_image(picture.file(), model.tokenizer.vision_card, model.limits)
    except (BadRequest, TooLarge) as error:
        raise image_refusal(picture.where, error.message.removeprefix("images: ")) from None
    return picture._replace(ready=ready)


def features_of(picture: Picture, model: Model) -> int:
    """The tokens of a prepared image, without those around its features."""
    assert picture.ready is not None
    return model.tokenizer.vision_card.features(picture.ready.facts.grids)


class Pictures:
    """The images of one request, in the order in which they were added. `sees`: whether the model takes any.

    `blind`: why this vision model accepts no images here; empty if it does.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.sees = model is not None and model.tokenizer.vision is not None
        self.blind = "" if model is None else model.tokenizer.blind
        self.all: list[Picture] = []

    def add(self, data: object, where: str) -> str:
        """The mark that stands for an image in a text. Raises a 400 for one that is no data URL and no base64."""
        if not isinstance(data, str) or not data:
            raise image_refusal(where, _NO_DATA)
        self.all.append(Picture(data, where))
        return image_mark(len(self.all) - 1)


async def fetched(pictures: Sequence[Picture], fetching: ImageFetching | None) -> list[Picture]:
    """The images with those behind URLs fetched, where `fetching` allows it. Raises a 400 that names the field."""
    # The images of one request leave threads to others, whose URLs would wait behind all of them.
    turns = asyncio.Semaphore(THREADS // 2)

    async def one(picture: Picture) -> Picture:
        if fetching is None or not picture.is_url:
            return picture
        try:
            async with turns:
                found = await asyncio.wrap_future(fetching.submit(picture.data))
        except BadRequest as error:
            raise image_refusal(picture.where, error.message) from None
        return picture._replace(fetched=found)

    return list(await asyncio.gather(*map(one, pictures)))


def image_refusal(where: str, message: str) -> ApiError:
    return bad_field(where, message, code="invalid_image")
