"""Marks in the texts of messages for images, until a chat template is to write their places."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A text that could name an image would show it as often as it likes: one of 6 MB, a thousand times, took 6 GB.
_OPEN, _CLOSE = f"\ufdd0{secrets.token_hex(8)}:", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class Shown(NamedTuple):
    """Messages with images as parts of their contents, and the numbers of these images in order."""

    messages: list[dict[str, object]]
    images: list[int]


def image_mark(number: int) -> str:
    """The mark that stands for the image of this number in a text."""
    return f"{_OPEN}{number}{_CLOSE}"


def shown(messages: Sequence[dict[str, object]]) -> Shown:
    """The messages with every mark as a part `{"type": "image"}`, as chat templates read images."""
    images: list[int] = []
    return Shown([_parted(message, images) for message in messages], images)


def _parted(message: dict[str, object], images: list[int]) -> dict[str, object]:
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
            images.append(int(piece))
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
