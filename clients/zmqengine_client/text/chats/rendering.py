"""Chats rendered by a model's own template, with the changes that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from zmqengine.errors import BadRequest
from zmqengine_client.images.prompts import without_marker
from zmqengine_client.text.answer_text import markers_of
from zmqengine_client.text.chats.history import (
    CHANGES,
    OWN_TOOLS,
    Messages,
    TemplateFacts,
    adapt_messages,
    complete_tools,
    left_out,
)
from zmqengine_client.text.chats.image_marks import shown
from zmqengine_client.text.tokenizer import Tokenizer

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Template variables that a caller may not set."""


class Rendered(NamedTuple):
    """The text of a chat, with the model's marker for each of its images, whose numbers are in order."""

    text: str
    images: list[int]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    variables: Mapping[str, object],
    *,
    images: bool = False,
) -> Rendered:
    """The text of a chat; changes are tried on messages and tools that the template refuses.

    Contents of messages are texts, with marks of images if there are `images`. Raises `BadRequest`.
    """
    try:
        return _changed(tokenizer, messages, tools, variables, images=images)
    except BadRequest as refusal:
        if tools:
            with contextlib.suppress(BadRequest):
                return _changed(tokenizer, messages, complete_tools(tools), variables, images=images)
        raise refusal from None


def reserved_name(variables: Iterable[str]) -> str | None:
    """The first name that no template variable of a caller may have, or None."""
    return next((name for name in variables if not name.isidentifier() or name in RESERVED), None)


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's template for chats with tools renders them."""
    template = tokenizer.template_for(tools=True) or ""
    variables = tokenizer.variables_of_template(tools=True)
    return "tools" in variables or "xml_tools" in variables or OWN_TOOLS.search(template) is not None


def _changed(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    variables: Mapping[str, object],
    *,
    images: bool,
) -> Rendered:
    facts = _facts(tokenizer, tools=bool(tools))
    adapted = adapt_messages(messages, tools, facts)
    options = {**_tool_variables(tools, facts.variables), **variables}
    if images:
        adapted, options = without_marker((adapted, options), tokenizer.image_marker)
    try:
        return _applied(tokenizer, adapted, options, images=images)
    except BadRequest as refusal:
        for change in CHANGES:
            changed = change(adapted)
            if changed != adapted:
                adapted = changed
                with contextlib.suppress(BadRequest):
                    return _applied(tokenizer, adapted, options, images=images)
        raise refusal from None


def _facts(tokenizer: Tokenizer, *, tools: bool) -> TemplateFacts:
    return TemplateFacts(
        tokenizer.template_for(tools=tools) or "",
        tokenizer.variables_of_template(tools=tools),
        tokenizer.compared_in_template(tools=tools),
        markers_of(tokenizer),
    )


def _tool_variables(tools: Sequence[Mapping[str, object]], variables: frozenset[str]) -> dict[str, object]:
    """The tools under the variable name that the template uses."""
    name = "xml_tools" if "xml_tools" in variables and "tools" not in variables else "tools"
    return {name: tools or None}


def _applied(
    tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, object], *, images: bool
) -> Rendered:
    apply: Callable[..., str] = tokenizer.apply_chat_template
    if not images:
        text = apply(messages, **variables)
        if left_out(messages, text):
            raise BadRequest("the model's chat template has no place for some of the messages")
        return Rendered(text, [])
    parted, numbers = shown(messages)
    text = apply(parted, **variables)
    if text.count(tokenizer.image_marker) != len(numbers):
        raise BadRequest("the model's chat template has no place for some of the images")
    return Rendered(text, numbers)
