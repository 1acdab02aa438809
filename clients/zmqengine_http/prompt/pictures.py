"""Images of a request: marks in the texts of its messages, until a chat template is to write their places."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.errors import BadRequest, TooLarge
from zmqengine_client.images.prompts import ReadyImage, ready_image
from zmqengine_client.images.sources import base64_bytes, data_url_bytes
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.serving.fetching import THREADS, ImageFetching
from zmqengine_http.workers.worker import Model

# A text that could name an image would show it as often as it likes: one of 6 MB, a thousand times, took 6 GB.
_OPEN, _CLOSE = f"\ufdd0{secrets.token_hex(8)}:", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


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
        return f"{_OPEN}{len(self.all) - 1}{_CLOSE}"


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


class Shown(NamedTuple):
    """Messages with images as parts of their contents, and these images in order."""

    messages: list[dict[str, object]]
    pictures: list[Picture]


def shown(messages: Sequence[dict[str, object]], pictures: Sequence[Picture]) -> Shown:
    """The messages with every mark as a part `{"type": "image"}`, as chat templates read images."""
    found: list[Picture] = []
    return Shown([_parted(message, pictures, found) for message in messages], found)


def _parted(
    message: dict[str, object], pictures: Sequence[Picture], found: list[Picture]
) -> dict[str, object]:
    content = message.get("content")
    if not isinstance(content, str) or _OPEN not in content:
        return message
    parts: list[Mapping[str, str]] = []
    # Texts at even places, the numbers of images between them.
    for place, piece in enumerate(_MARK.split(content)):
        if place % 2 == 0:
            parts += [{"type": "text", "text": piece}] if piece.strip() else []
        else:
            parts.append({"type": "image"})
            found.append(pictures[int(piece)])
    return {**message, "content": parts}


def hoist_results(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The messages with the images of tool results in a user message behind the results."""
    hoisted: list[dict[str, object]] = []
    marks: list[str] = []
    for message in [*messages, {}]:
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, str) and _MARK.search(content):
            marks += [match[0] for match in _MARK.finditer(content)]
            hoisted.append({**message, "content": _MARK.sub("(an image, shown below)", content)})
            continue
        if marks and message.get("role") != "tool":
            hoisted.append({"role": "user", "content": "".join(marks)})
            marks = []
        hoisted += [message] if message else []
    return hoisted
