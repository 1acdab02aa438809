"""Chats rendered by a model's own template, and its variables for tools and reasoning."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.errors import BadRequest
from zmqengine_client.images.prompts import without_marker
from zmqengine_http.prompt.history import (
    CHANGES,
    OWN_TOOLS,
    Messages,
    TemplateFacts,
    adapt_messages,
    complete_tools,
    left_out,
)
from zmqengine_http.prompt.pictures import Picture, shown
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.workers.worker import Model

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Template variables that `chat_template_kwargs` may not set."""
_SWITCHES = ("enable_thinking", "thinking")


def render_chat(
    model: Model,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    variables: Mapping[str, object],
    pictures: Sequence[Picture] = (),
) -> Rendered:
    """The text of a chat and its images. Raises a 400 for tools, messages or variables that the template cannot
    take."""
    template = model.tokenizer.template_for(tools=bool(tools))
    if not template:
        instead = "use /v1/completions" if model.card.generates else "it makes embeddings or scores"
        raise bad_field("messages", f"this model has no chat template; {instead}")
    for name in variables:
        if not name.isidentifier() or name in RESERVED:
            raise bad_field("chat_template_kwargs", f"{name[:40]!r} cannot be set")
    known = model.tokenizer.variables_of_template(tools=bool(tools))
    if tools and not takes_tools(model):
        raise bad_field("tools", "this model's chat template takes none", code="unsupported_parameter")
    compared = model.tokenizer.compared_in_template(tools=bool(tools))
    facts = TemplateFacts(template, known, compared, model.markers)
    render = functools.partial(_rendered, model, facts, variables, pictures)
    try:
        return render(messages, tools)
    except BadRequest as refusal:
        if tools and _takes(render, messages, complete_tools(tools)):
            return render(messages, complete_tools(tools))
        raise _named_refusal(render, messages, tools, refusal) from None


class Rendered(NamedTuple):
    """The text of a chat, with the model's marker for each of its images."""

    text: str
    pictures: list[Picture]


_Render = Callable[[Sequence[dict[str, object]], Sequence[dict[str, object]]], Rendered]


def _rendered(
    model: Model,
    facts: TemplateFacts,
    variables: Mapping[str, object],
    pictures: Sequence[Picture],
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
) -> Rendered:
    """The text of a chat; changes are tried on messages that the template refuses. Raises `BadRequest`."""
    adapted = adapt_messages(messages, tools, facts)
    options = {**tool_variables(tools, facts.variables), **variables}
    if pictures:
        adapted, options = without_marker((adapted, options), model.tokenizer.image_marker)
    try:
        return _applied(model, adapted, options, pictures)
    except BadRequest as refusal:
        for change in CHANGES:
            changed = change(adapted)
            if changed != adapted:
                adapted = changed
                with contextlib.suppress(BadRequest):
                    return _applied(model, adapted, options, pictures)
        raise refusal from None


def _applied(
    model: Model, messages: Messages, options: Mapping[str, object], pictures: Sequence[Picture]
) -> Rendered:
    apply: Callable[..., str] = model.tokenizer.apply_chat_template
    if not pictures:
        text = apply(messages, **options)
        if left_out(messages, text):
            raise BadRequest("the model's chat template has no place for some of the messages")
        return Rendered(text, [])
    parted, found = shown(messages, pictures)
    text = apply(parted, **options)
    if text.count(model.tokenizer.image_marker) != len(found):
        raise BadRequest("the model's chat template has no place for some of the images")
    return Rendered(text, found)


def _takes(
    render: _Render, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]
) -> bool:
    try:
        render(messages, tools)
    except BadRequest:
        return False
    return True


def _named_refusal(
    render: _Render,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    refusal: BadRequest,
) -> ApiError:
    """A 400 that names the tools, or the message at which the template refuses the chat."""
    if tools and _takes(render, messages, ()):
        return bad_field("tools", refusal.message[:500])
    taken, refused = 0, len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if _takes(render, messages[:middle], tools):
            taken = middle
        else:
            refused = middle
    role = messages[refused - 1]["role"]
    number = sum(message["role"] == role for message in messages[:refused])
    return bad_field("messages", f"at number {number} of role {role}: {refusal.message[:500]}")


def takes_tools(model: Model) -> bool:
    """Whether the model's template for chats with tools renders them."""
    template = model.tokenizer.template_for(tools=True) or ""
    variables = model.tokenizer.variables_of_template(tools=True)
    return "tools" in variables or "xml_tools" in variables or OWN_TOOLS.search(template) is not None


def tool_variables(tools: Sequence[Mapping[str, object]], variables: frozenset[str]) -> dict[str, object]:
    """The tools under the variable name that the template uses."""
    name = "xml_tools" if "xml_tools" in variables and "tools" not in variables else "tools"
    return {name: tools or None}


def reasoning_variables(model: Model, effort: str | None) -> dict[str, object] | None:
    """The template variables for a reasoning effort, or None if the template has none.

    For a template that can only turn reasoning on and off: `none` is off, any other effort on.
    """
    if effort is None:
        return {}
    known = model.tokenizer.template_variables
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    keyword = thinking_keyword(model)
    return {keyword: effort != "none"} if keyword in known else None


def thinking_keyword(model: Model) -> str:
    """The template variable that turns reasoning on and off; the usual name if the template has none."""
    given = model.tokenizer.facts.get("thinking_keyword")
    known = model.tokenizer.template_variables
    return next((word for word in (str(given), *_SWITCHES) if word in known), _SWITCHES[0])
