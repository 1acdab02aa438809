"""Content that a text model cannot read: a short text in its place, or a 400.

An image in a tool result or in an earlier turn is beyond the client's reach: the agent would send it again with
every turn, and a refusal would end its session. There the model reads that something was shown. So it does in all
messages of a request that offers tools: some agents attach each image whose path the user names, and keep a refused
message. In a chat without tools an image in the user's newest message is refused, before the user waits for an answer
that cannot be about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.errors import ApiError

_NOUNS = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "computer_screenshot": "a screenshot",
    "document": "a document",
    "file": "a file",
    "input_file": "a file",
    "audio": "an audio recording",
    "input_audio": "an audio recording",
    "video": "a video",
    "video_url": "a video",
}


def unread_text(kind: str, name: str | None = None) -> str:
    """The text in the place of content of type `kind`, with its file name if there is one."""
    noun = _NOUNS.get(kind) or f"content of type {kind[:40]!r}"
    shown = f" ({name[:120]})" if name else ""
    return f"[{noun}{shown}, which this model cannot see: it reads text only]"


def refusal(kind: str, where: str, pictures: Pictures) -> ApiError:
    """The 400 for content in the newest message of a chat without tools, with the worker's reason for an image."""
    because = f" ({pictures.blind})" if pictures.blind and _NOUNS.get(kind) == "an image" else ""
    kinds = "text and images" if pictures.sees else "text"
    return ApiError(
        400,
        f"{where}: this model reads {kinds} only{because}, it cannot take content of type {kind[:40]!r}; describe it "
        "in words, or leave it out",
        param=where,
        code="unsupported_value",
    )


def newest_question(roles: Sequence[str], *, tools: bool) -> int | None:
    """The index of the user's newest message if it awaits an answer, else None; None in a request that offers `tools`.

    `roles` are `user`, `assistant`, `tool` and others, one per message. A user message in the turn of a tool result
    belongs to the result: many agents send the image of a tool beside the result, or after it.
    """
    if tools:
        return None
    newest = None
    for index in reversed(range(len(roles))):
        if roles[index] == "user" and newest is None:
            newest = index
        elif roles[index] == "tool":
            return None
        elif roles[index] == "assistant":
            break
    return newest
