"""Messages of a caller as a rendering takes them: contents are texts, images marks in them, arguments objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zmqengine.errors import BadRequest
from zmqengine_client.images.sources import ImageLike
from zmqengine_client.text.chats.history import history_arguments
from zmqengine_client.text.chats.image_marks import image_mark

ROLES = ("system", "developer", "user", "assistant", "tool")


class TakenMessages(NamedTuple):
    """Messages with marks for their images, and the images in order."""

    messages: list[dict[str, object]]
    images: list[ImageLike]


def take_messages(messages: Sequence[Mapping[str, Any]]) -> TakenMessages:
    """The messages and their images: parts `{"type": "image", "image": ...}`, and those of OpenAI's form.

    Raises `BadRequest`, naming the place, for what a template would drop or misread.
    """
    if not messages:
        raise BadRequest("messages: at least one is needed")
    images: list[ImageLike] = []
    return TakenMessages(
        [_taken(message, f"messages[{index}]", images) for index, message in enumerate(messages)], images
    )


def _taken(message: Mapping[str, Any], where: str, images: list[ImageLike]) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: a message is a mapping with a role and a content")
    if message.get("role") not in ROLES:
        raise BadRequest(f"{where}.role: {message.get('role')!r} is none of {', '.join(ROLES)}")
    taken = {**message, "content": _text(message.get("content"), f"{where}.content", images)}
    if message["role"] != "assistant" and message.get("content") is None:
        raise BadRequest(f"{where}.content: a text, or a list of parts")
    calls = message.get("tool_calls")
    if calls:
        taken["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return taken


def _text(content: object, where: str, images: list[ImageLike]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise BadRequest(f"{where}: a text, or a list of parts")
    return "".join(_part(part, f"{where}[{index}]", images) for index, part in enumerate(content))


def _part(part: object, where: str, images: list[ImageLike]) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
        raise BadRequest(f"{where}: a part is a text or an image")
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.text: a part of type text has one")
        return str(part["text"])
    image = part.get(kind)
    if kind == "image_url" and isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        raise BadRequest(
            f"{where}: a part of type {kind} has its image as {kind!r}: a path, bytes, a data URL or a PIL image"
        )
    images.append(image)
    return image_mark(len(images) - 1)


def _call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not function.get("name"):
        raise BadRequest(f'{where}: a call is {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}')
    arguments = history_arguments(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
