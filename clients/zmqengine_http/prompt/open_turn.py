"""A last assistant message that the output continues, as the end of the prompt instead of a turn of its own."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model


class OpenTurn(Struct, frozen=True):
    """The text behind the marker that opens the assistant's turn.

    `read` is its part behind the markers that the template wrote: a splitter reads it before the output.
    """

    text: str
    read: str
    reasoning_open: bool = False


def open_turn(model: Model, message: Mapping[str, object], *, reasoning_open: bool) -> OpenTurn:
    """The open turn of an assistant message; `reasoning_open` if the template has opened the reasoning.

    A message with reasoning and no content continues the reasoning. Raises a 400 for a model whose turns have a
    frame that is not known well enough to be left open.
    """
    content, reasoning = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    markers = model.markers
    if markers.harmony:
        analysis = f"<|channel|>analysis<|message|>{reasoning}" if reasoning or not content else ""
        final = f"<|channel|>final<|message|>{content}"
        between = "<|end|><|start|>assistant" if analysis else ""
        text = f"{analysis}{between}{final}" if content else analysis
        return OpenTurn(text, text)
    if markers.addressed or markers.frames:
        raise bad_field(
            "messages",
            "the last message is the assistant's, and this model's turns cannot be continued: end with a user's",
            code="unsupported_value",
        )
    if not markers.think_end:
        return OpenTurn(content, content)
    opened = "" if reasoning_open or not reasoning else f"{markers.think_start}\n"
    if not content:
        return OpenTurn(opened + reasoning, "", reasoning_open or bool(reasoning))
    closed = f"{markers.think_end}\n\n" if reasoning_open or reasoning else ""
    return OpenTurn(opened + reasoning + closed + content, content)
