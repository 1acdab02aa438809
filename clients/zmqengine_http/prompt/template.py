"""Chats rendered by a model's own template: messages are adapted to the places that the template has for
them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.errors import BadRequest
from zmqengine_client.images.prompts import without_marker
from zmqengine_http.prompt.pictures import Picture, hoist_results, shown
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.tool_calls import Markers, ParsedCall
from zmqengine_http.workers.worker import Model

Messages = list[dict[str, object]]
RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Template variables that `chat_template_kwargs` may not set."""
_ONE_CALL = re.compile(r"tool_calls(?:\[0\]|\s*\|\s*first)")
_EACH_CALL = re.compile(r"\bin\s+[\w.]*(?:\.|\[['\"])tool_calls\b|\bin\s+tool_calls\b")
_OWN_TOOLS = re.compile(r"message(?:\.|\[['\"])tools\b")
_SWITCHES = ("enable_thinking", "thinking")


def render_chat(
    model: Model,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    variables: Mapping[str, object],
    pictures: Sequence[Picture] = (),
) -> Rendered:
    """The text of a chat and its images. Raises a 400 for tools or variables that the template cannot take,
    `BadRequest` from it."""
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
    adapted = adapt_messages(messages, tools, template, known, model.markers)
    options = {**tool_variables(tools, known), **variables}
    if pictures:
        adapted, options = without_marker((adapted, options), model.tokenizer.image_marker)
    return _rendered(model, adapted, options, pictures)


class Rendered(NamedTuple):
    """The text of a chat, with the model's marker for each of its images."""

    text: str
    pictures: list[Picture]


def _rendered(
    model: Model, messages: Messages, options: Mapping[str, object], pictures: Sequence[Picture]
) -> Rendered:
    apply: Callable[..., str] = model.tokenizer.apply_chat_template

    def render(messages: Messages) -> Rendered:
        if not pictures:
            return Rendered(apply(messages, **options), [])
        parted, found = shown(messages, pictures)
        text = apply(parted, **options)
        if text.count(model.tokenizer.image_marker) != len(found):
            raise BadRequest("the model's chat template has no place for some of the images")
        return Rendered(text, found)

    try:
        return render(messages)
    except BadRequest as refusal:
        # Many templates demand that user and assistant alternate, and many clients send two user messages in
        # a row. Others take one call at a time, concatenate arguments as strings, or have no system role.
        # Some have no place for an image in the result of a tool.
        for change in (
            hoist_results,
            merge_adjacent,
            split_parallel_calls,
            stringify_arguments,
            fold_system_into_user,
        ):
            changed = change(messages)
            if changed != messages:
                messages = changed
                with contextlib.suppress(BadRequest):
                    return render(messages)
        raise refusal from None


def takes_tools(model: Model) -> bool:
    """Whether the model's template for chats with tools renders them."""
    template = model.tokenizer.template_for(tools=True) or ""
    variables = model.tokenizer.variables_of_template(tools=True)
    return "tools" in variables or "xml_tools" in variables or _OWN_TOOLS.search(template) is not None


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


def adapt_messages(
    messages: Sequence[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    template: str,
    variables: frozenset[str],
    markers: Markers,
) -> Messages:
    """The messages in the form that this template reads.

    - The role `developer` becomes `system` if the template does not know it.
    - Tools go into the system message if the template reads them there.
    - Calls are written into the content, in the model's own format, if the template does not render
      `tool_calls`.
    - Parallel calls become turns of one call, each followed by its result, if the template renders only the
      first call.
    - Reasoning is given under the template's name for it.
    """
    adapted = [_known_role(message, template) for message in messages]
    if tools and "tools" not in variables and _OWN_TOOLS.search(template):
        adapted = _with_own_tools(adapted, tools)
    if _ONE_CALL.search(template) and not _EACH_CALL.search(template):
        adapted = split_parallel_calls(adapted)
    if "tool_calls" not in template:
        adapted = [_with_written_calls(message, markers) for message in adapted]
    if "reasoning_content" not in template:
        adapted = [_with_named_reasoning(message, template) for message in adapted]
    return adapted


def _known_role(message: dict[str, object], template: str) -> dict[str, object]:
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return message


def _with_own_tools(messages: Messages, tools: Sequence[Mapping[str, object]]) -> Messages:
    written = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, rest = messages[:1], messages[1:]
    if not first or first[0]["role"] != "system":
        first, rest = [{"role": "system", "content": ""}], messages
    return [{**first[0], "tools": written}, *rest]


def _with_written_calls(message: dict[str, object], markers: Markers) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or markers.calls is None or markers.calls.write is None:
        return message
    functions = [call["function"] for call in calls]
    if not all(isinstance(function["arguments"], dict) for function in functions):
        return message
    text = markers.calls.write(
        [ParsedCall(function["name"], function["arguments"]) for function in functions]
    )
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{message.get('content') or ''}{text}"}


def _with_named_reasoning(message: dict[str, object], template: str) -> dict[str, object]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    named: dict[str, object] = {"reasoning": reasoning}
    if "tool_plan" in template:
        named["tool_plan"] = reasoning
    # gpt-oss takes either reasoning or content beside a call, and raises for both.
    if not (message.get("tool_calls") and message.get("content")):
        named["thinking"] = reasoning
    return {**message, **named}


def split_parallel_calls(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with one call per assistant turn, each followed by its result."""
    split: Messages = []
    waiting: dict[object, dict[str, object]] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "tool":
            split += [turn] if (turn := waiting.pop(message.get("tool_call_id"), None)) else []
        else:
            split += waiting.values()
            waiting = {}
        if isinstance(calls, list) and len(calls) > 1:
            split.append({**message, "tool_calls": calls[:1]})
            waiting = {
                call.get("id"): {"role": message["role"], "content": "", "tool_calls": [call]}
                for call in calls[1:]
            }
        else:
            split.append(message)
    return [*split, *waiting.values()]


def stringify_arguments(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with the arguments of calls as JSON strings, for templates that concatenate them."""
    return [
        {**message, "tool_calls": [_with_json(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_json(call: dict[str, dict[str, object]]) -> dict[str, object]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def merge_adjacent(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with adjacent user, or adjacent assistant, messages merged, separated by a blank line."""
    merged: Messages = []
    for message in messages:
        last = merged[-1] if merged else {}
        plain = message.keys() == {"role", "content"} == last.keys()
        if plain and message["role"] == last["role"] and message["role"] in ("user", "assistant"):
            merged[-1] = {**message, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def fold_system_into_user(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with a leading system message prepended to the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return list(messages)
    system, user, *rest = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
