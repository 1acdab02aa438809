"""Messages with images for a chat template, and the tokens of images in place of its placeholders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zmqengine.errors import BadRequest, TooLarge
from zmqengine.protocol.messages import ImageRef, Limits
from zmqengine.vision_card import VisionCard
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.preparing import IMAGES, ImageFacts
from zmqengine_client.images.prompt_image import PromptImage

WORD_JOINER = "\u2060"


class Expanded(NamedTuple):
    """A prompt with the tokens of its images, and their spans."""

    ids: list[int]
    spans: list[ImageRef]


class Placed(NamedTuple):
    """A prompt with the tokens of its images, and the images as an insert has them."""

    ids: list[int]
    images: list[PromptImage]


class ReadyImage(NamedTuple):
    """An image for a prompt. `body` has its pixels if they had to be made; `make` makes them again, and blocks."""

    facts: ImageFacts
    make: Callable[[], ImageBody]
    body: ImageBody | None


def ready_image(data: bytes, card: VisionCard, limits: Limits) -> ReadyImage:
    """The image in a file. Blocking. Raises `BadRequest` and `TooLarge`."""
    prepared = IMAGES.prepare(data, card, limits.image_patches_max)
    make = functools.partial(IMAGES.body, data, card, limits.image_patches_max)
    return ReadyImage(prepared.facts, make, prepared.body)


def ready_images(files: Sequence[bytes], card: VisionCard, limits: Limits) -> list[ReadyImage]:
    """The images in these files. Blocking.

    Raises `BadRequest` and `TooLarge`, with the number of the image where it is about one of them.
    """
    if len(files) > limits.images_max:
        raise BadRequest(f"images: {len(files)}, the worker takes {limits.images_max} in one request")
    return [_numbered(index, data, card, limits) for index, data in enumerate(files)]


def _numbered(place: int, data: bytes, card: VisionCard, limits: Limits) -> ReadyImage:
    try:
        return ready_image(data, card, limits)
    except (BadRequest, TooLarge) as error:
        raise type(error)(f"image {place}: {error.message.removeprefix('images: ')}") from None


def place_images(ids: Sequence[int], images: Sequence[ReadyImage], card: VisionCard) -> Placed:
    """The tokens of images in place of their placeholders. Raises `BadRequest` as `expand` does."""
    expanded = expand(ids, [image.facts for image in images], card)
    placed = [
        PromptImage(span, image.make, image.body) for span, image in zip(expanded.spans, images, strict=True)
    ]
    return Placed(expanded.ids, placed)


def with_markers(prompt: str, marker: str, count: int) -> str:
    """The prompt with `count` markers: its own, or that many before it if it has none."""
    return prompt if marker in prompt else marker * count + prompt


def without_marker(value: Any, marker: str) -> Any:
    """`value` with every `marker` in its texts broken up: what a user writes is text, not the place of an image."""
    if isinstance(value, str):
        return value.replace(marker, marker[:1] + WORD_JOINER + marker[1:])
    if isinstance(value, Mapping):
        return {without_marker(key, marker): without_marker(item, marker) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_marker(item, marker) for item in value]
    return value


def expand(ids: Sequence[int], images: Sequence[ImageFacts], card: VisionCard) -> Expanded:
    """The prompt with the tokens of each image in place of its placeholder.

    Raises `BadRequest` unless there are as many placeholders as images.
    """
    places = [place for place, id_ in enumerate(ids) if id_ == card.placeholder]
    if len(places) != len(images):
        raise BadRequest(
            f"the prompt has {len(places)} places for {len(images)} images: the model's chat template puts none where "
            "some of them are"
        )
    expanded: list[int] = []
    spans: list[ImageRef] = []
    start = 0
    for place, image in zip(places, images, strict=True):
        expanded += ids[start:place]
        tokens = list(image_tokens(image, card))
        spans.append(ImageRef(image.hash, len(expanded), len(tokens), list(image.grids)))
        expanded += tokens
        start = place + 1
    return Expanded([*expanded, *ids[start:]], spans)


def image_tokens(image: ImageFacts, card: VisionCard) -> Iterator[int]:
    """The tokens of one image, as SPEC.md lays them out."""
    rows, columns = image.layout.rows, image.layout.columns
    yield from card.begin
    if rows * columns == 1:
        yield from card.single_begin
        down, across = image.grids[0]
        for row in range(down // card.merge):
            yield from card.line_end if row else ()
            yield from (card.token for _ in range(across // card.merge))
    else:
        grids = iter(image.grids)
        for row in range(rows):
            yield from card.row_end if row else ()
            for column in range(columns):
                if card.tile_begin:
                    yield from card.tile_begin[row][column]
                yield from [card.token] * card.features([next(grids)])
        if image.layout.overview is not None:
            yield from card.overview_begin
            yield from [card.token] * card.features([next(grids)])
    yield from card.end
