"""Chats rendered by a model's own template, with refusals that name a field, and its variables for reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.errors import BadRequest
from zmqengine_client.text.chats import rendering
from zmqengine_http.prompt.pictures import Picture
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.workers.worker import Model

_SWITCHES = ("enable_thinking", "thinking")


class RenderedChat(NamedTuple):
    """The text of a chat, with the model's marker for each of its images."""

    text: str
    pictures: list[Picture]


def render_chat(
    model: Model,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    variables: Mapping[str, object],
    pictures: Sequence[Picture] = (),
) -> RenderedChat:
    """The text of a chat and its images. Raises a 400 for tools, messages or variables that the template cannot
    take."""
    if not model.tokenizer.template_for(tools=bool(tools)):
        instead = "use /v1/completions" if model.card.generates else "it makes embeddings or scores"
        raise bad_field("messages", f"this model has no chat template; {instead}")
    if (name := rendering.reserved_name(variables)) is not None:
        raise bad_field("chat_template_kwargs", f"{name[:40]!r} cannot be set")
    if tools and not takes_tools(model):
        raise bad_field("tools", "this model's chat template takes none", code="unsupported_parameter")
    chat = _Chat(model, variables, bool(pictures))
    try:
        rendered = chat.rendered(messages, tools)
    except BadRequest as refusal:
        raise _named_refusal(chat, messages, tools, refusal) from None
    return RenderedChat(rendered.text, [pictures[number] for number in rendered.images])


def takes_tools(model: Model) -> bool:
    """Whether the model's template for chats with tools renders them."""
    return rendering.takes_tools(model.tokenizer)


class _Chat(NamedTuple):
    """A chat without its messages, of which more or fewer are tried."""

    model: Model
    variables: Mapping[str, object]
    has_images: bool

    def rendered(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]
    ) -> rendering.Rendered:
        return rendering.render_chat(
            self.model.tokenizer, messages, tools, self.variables, images=self.has_images
        )

    def takes(self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]) -> bool:
        try:
            self.rendered(messages, tools)
        except BadRequest:
            return False
        return True


def _named_refusal(
    chat: _Chat,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    refusal: BadRequest,
) -> ApiError:
    """A 400 that names the tools, or the message at which the template refuses the chat."""
    if tools and chat.takes(messages, ()):
        return bad_field("tools", refusal.message[:500])
    taken, refused = 0, len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if chat.takes(messages[:middle], tools):
            taken = middle
        else:
            refused = middle
    role = messages[refused - 1]["role"]
    number = sum(message["role"] == role for message in messages[:refused])
    return bad_field("messages", f"at number {number} of role {role}: {refusal.message[:500]}")


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
