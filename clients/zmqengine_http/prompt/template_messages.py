"""Messages as one model's chat template reads them: templates differ in what they have places for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from zmqengine_http.tool_calls import Call, Markers

Messages = list[dict[str, object]]
_ONE_CALL = re.compile(r"tool_calls(?:\[0\]|\s*\|\s*first)")
_EACH_CALL = re.compile(r"\bin\s+[\w.]*(?:\.|\[['\"])tool_calls\b|\bin\s+tool_calls\b")
_OWN_TOOLS = re.compile(r"message(?:\.|\[['\"])tools\b")


def takes_tools(template: str, variables: frozenset[str]) -> bool:
    """Whether a template has a place for tools."""
    return "tools" in variables or "xml_tools" in variables or _OWN_TOOLS.search(template) is not None


def tool_variables(tools: Sequence[Mapping[str, object]], variables: frozenset[str]) -> dict[str, object]:
    """The tools by the name that a template has for them."""
    name = "xml_tools" if "xml_tools" in variables and "tools" not in variables else "tools"
    return {name: tools or None}


def fitted(
    messages: Sequence[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    template: str,
    variables: frozenset[str],
    markers: Markers,
) -> Messages:
    """The messages with everything where this template looks for it.

    - A role `developer` that it does not know is `system`.
    - Tools that it reads off the system message are there.
    - Calls that it cannot write are in the content, as the model would have written them.
    - Several calls at once are told one after another, each with its result, if it writes only the first.
    - Reasoning has its own word for it.
    """
    made = [_known_role(message, template) for message in messages]
    if tools and "tools" not in variables and _OWN_TOOLS.search(template):
        made = _with_own_tools(made, tools)
    if _ONE_CALL.search(template) and not _EACH_CALL.search(template):
        made = one_by_one(made)
    if "tool_calls" not in template:
        made = [_with_written_calls(message, markers) for message in made]
    if "reasoning_content" not in template:
        made = [_with_named_reasoning(message, template) for message in made]
    return made


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
    text = markers.calls.write([Call(function["name"], function["arguments"]) for function in functions])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{message.get('content') or ''}{text}"}


def _with_named_reasoning(message: dict[str, object], template: str) -> dict[str, object]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    named: dict[str, object] = {"reasoning": reasoning}
    if "tool_plan" in template:
        named["tool_plan"] = reasoning
    # gpt-oss takes either reasoning or content beside a call, and refuses both.
    if not (message.get("tool_calls") and message.get("content")):
        named["thinking"] = reasoning
    return {**message, **named}


def one_by_one(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with one call in each, behind it its result."""
    made: Messages = []
    waiting: dict[object, dict[str, object]] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "tool":
            made += [turn] if (turn := waiting.pop(message.get("tool_call_id"), None)) else []
        else:
            made += waiting.values()
            waiting = {}
        if isinstance(calls, list) and len(calls) > 1:
            made.append({**message, "tool_calls": calls[:1]})
            waiting = {
                call.get("id"): {"role": message["role"], "content": "", "tool_calls": [call]}
                for call in calls[1:]
            }
        else:
            made.append(message)
    return [*made, *waiting.values()]


def with_written_arguments(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with the arguments of calls as JSON, for templates that put texts together."""
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


def with_merged_neighbours(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with neighbours of the user, or of the assistant, as one, a blank line between their texts."""
    merged: Messages = []
    for message in messages:
        last = merged[-1] if merged else {}
        plain = message.keys() == {"role", "content"} == last.keys()
        if plain and message["role"] == last["role"] and message["role"] in ("user", "assistant"):
            merged[-1] = {**message, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def with_system_in_user(messages: Sequence[dict[str, object]]) -> Messages:
    """The messages with the first one's instructions in front of what the user says first."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return list(messages)
    system, user, *rest = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
