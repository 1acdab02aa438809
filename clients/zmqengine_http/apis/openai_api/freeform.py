"""Freeform (custom) tools, whose input is one text: for a model, functions with one string argument."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FREEFORM: dict[str, object] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The parameters of the function."""


def freeform_description(description: str | None, format_: object) -> str:
    """The description of the function; it tells the grammar of the input, in either API's place for it."""
    text = description or ""
    inner = format_.get("grammar", format_) if isinstance(format_, Mapping) else None
    definition = inner.get("definition") if isinstance(inner, Mapping) else None
    if isinstance(definition, str) and definition:
        text += f"\nThe input follows this grammar:\n{definition}"
    return text


def freeform_input(arguments: str) -> str:
    """The input in the JSON arguments of a call; the arguments themselves if they hold none."""
    try:
        input_ = msgspec.json.decode(arguments, type=dict[str, object]).get("input")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return input_ if isinstance(input_, str) else arguments
