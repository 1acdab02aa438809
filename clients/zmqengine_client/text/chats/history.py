"""The messages of a chat, adapted to the places that a chat template has for them, and the changes that are tried on
those that it refuses."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from zmqengine_client.text.chats.image_marks import hoist_results
from zmqengine_client.text.tool_calls import Markers, ParsedCall
from zmqengine_client.text.tool_calls.lenient_json import Malformed, read_whole

Message = dict[str, object]
Messages = list[Message]
_ONE_CALL = re.compile(r"tool_calls(?:\[0\]|\s*\|\s*first)")
_EACH_CALL = re.compile(r"\bin\s+[\w.]*(?:\.|\[['\"])tool_calls\b|\bin\s+tool_calls\b")
OWN_TOOLS = re.compile(r"message(?:\.|\[['\"])tools\b")


class TemplateFacts(NamedTuple):
    """The facts that decide how messages are adapted: the template, the variables it reads, the texts that it compares
    others with, and the markers of the model."""

    template: str
    variables: frozenset[str]
    compared: frozenset[str]
    markers: Markers


def adapt_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], facts: TemplateFacts
) -> Messages:
    """The messages in the form that this template reads.

    - Results of calls stand in the order of their calls, since most templates write no ids.
    - Ids of calls are those that the model writes, if its format has ids.
    - The role `developer` becomes `system` if the template compares no role with it.
    - Tools go into the system message if the template reads them there.
    - Calls are written into the content, in the model's own format, if the template does not render
      `tool_calls`.
    - Parallel calls become turns of one call, each followed by its result, if the template renders only the
      first call.
    - Reasoning is given under the template's name for it.
    """
    template, markers = facts.template, facts.markers
    adapted = order_results(messages)
    if markers.calls and markers.calls.written_id:
        adapted = rename_ids(adapted, markers.calls.written_id)
    if "developer" not in facts.compared:
        adapted = developer_as_system(adapted)
    if tools and "tools" not in facts.variables and OWN_TOOLS.search(template):
        adapted = _with_own_tools(adapted, tools)
    if _ONE_CALL.search(template) and not _EACH_CALL.search(template):
        adapted = split_parallel_calls(adapted)
    if "tool_calls" not in template:
        adapted = [_with_written_calls(message, markers) for message in adapted]
    if "reasoning_content" not in template:
        adapted = [_with_named_reasoning(message, template) for message in adapted]
    return adapted


def history_arguments(given: object) -> dict[str, object]:
    """The arguments of a call in a history, as an object: templates iterate over it.

    No text, and null, are no arguments. Text that is no object (a call that was cut) is its one member `arguments`.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if given is None or not isinstance(given, str) or given.strip() in ("", "null"):
        return {}
    value = _decoded(given)
    if isinstance(value, str):
        # Some clients encode twice.
        value = _decoded(value)
    return value if isinstance(value, dict) else {"arguments": given}


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return read_whole(text)
    except Malformed:
        return None


def order_results(messages: Sequence[Message]) -> Messages:
    """The messages with the results behind each turn in the order of its calls.

    A result with an id that is not a call's takes the first place that is left.
    """
    ordered: Messages = []
    ids: list[object] = []
    results: Messages = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool" and ids:
            results.append(message)
            continue
        ordered += _in_order(results, ids)
        ids, results = [], []
        if message is not None:
            ordered.append(message)
            ids = [call.get("id") for call in _calls_of(message)]
    return ordered


def _in_order(results: Messages, ids: Sequence[object]) -> Messages:
    places: list[Message | None] = [None] * len(ids)
    unknown: Messages = []
    free: dict[object, list[int]] = {}
    for place in reversed(range(len(ids))):
        free.setdefault(ids[place], []).append(place)
    for result in results:
        known = free.get(result.get("tool_call_id"))
        if known:
            places[known.pop()] = result
        else:
            unknown.append(result)
    rest = iter(unknown)
    filled = [result if result is not None else next(rest, None) for result in places]
    return [result for result in filled if result is not None] + list(rest)


def rename_ids(messages: Sequence[Message], written_id: str) -> Messages:
    """The messages with the ids of calls, and of their results, as the model writes them: numbered from 0."""
    renamed: Messages = []
    waiting: dict[object, deque[str]] = {}
    count = 0
    for message in messages:
        calls = []
        new: dict[object, deque[str]] = {}
        for call in _calls_of(message):
            id_ = written_id.format(name=_function_of(call)["name"], index=count)
            calls.append({**call, "id": id_})
            new.setdefault(call.get("id"), deque()).append(id_)
            count += 1
        waiting.update(new)
        ids = waiting.get(message.get("tool_call_id"))
        if calls:
            renamed.append({**message, "tool_calls": calls})
        elif ids:
            renamed.append({**message, "tool_call_id": ids.popleft() if len(ids) > 1 else ids[0]})
        else:
            renamed.append(message)
    return renamed


def developer_as_system(messages: Sequence[Message]) -> Messages:
    """The messages with the role `system` instead of `developer`."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]


def _with_own_tools(messages: Messages, tools: Sequence[Mapping[str, object]]) -> Messages:
    written = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, rest = messages[:1], messages[1:]
    if not first or first[0]["role"] != "system":
        first, rest = [{"role": "system", "content": ""}], messages
    return [{**first[0], "tools": written}, *rest]


def _with_written_calls(message: Message, markers: Markers) -> Message:
    calls = _calls_of(message)
    if not calls or markers.calls is None or not markers.calls.layouts:
        return message
    text = markers.calls.write(
        [
            ParsedCall(str(function["name"]), history_arguments(function["arguments"]))
            for function in map(_function_of, calls)
        ]
    )
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{message.get('content') or ''}{text}"}


def _with_named_reasoning(message: Message, template: str) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    named: Message = {"reasoning": reasoning}
    if "tool_plan" in template:
        named["tool_plan"] = reasoning
    # gpt-oss takes either reasoning or content beside a call, and raises for both.
    if not (message.get("tool_calls") and message.get("content")):
        named["thinking"] = reasoning
    return {**message, **named}


def _calls_of(message: Message) -> Sequence[dict[str, object]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _function_of(call: Mapping[str, object]) -> dict[str, object]:
    function = call["function"]
    assert isinstance(function, dict)
    return function


# --- changes to what a template refuses ----------------------------------------------------------------------


def split_parallel_calls(messages: Sequence[Message]) -> Messages:
    """The messages with one call per assistant turn, each followed by its result."""
    split: Messages = []
    waiting: dict[object, Message] = {}
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


def stringify_arguments(messages: Sequence[Message]) -> Messages:
    """The messages with the arguments of calls as JSON strings, for templates that concatenate them."""
    return [
        {**message, "tool_calls": [_with_json(call) for call in calls]}
        if (calls := _calls_of(message))
        else message
        for message in messages
    ]


def _with_json(call: dict[str, object]) -> dict[str, object]:
    function = _function_of(call)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def merge_adjacent(messages: Sequence[Message]) -> Messages:
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


def fold_system_into_user(messages: Sequence[Message]) -> Messages:
    """The messages with a leading system message prepended to the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return list(messages)
    system, user, *rest = messages
    said = "\n\n".join(str(each["content"]) for each in (system, user) if each["content"])
    return [{**user, "content": said}, *rest]


def add_user_message(messages: Sequence[Message]) -> Messages:
    """The messages with an empty one of the user behind the system's, if the user's is not the first there."""
    head = next(
        (place for place, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if messages[head:] and messages[head]["role"] == "user":
        return list(messages)
    return [*messages[:head], {"role": "user", "content": ""}, *messages[head:]]


def results_as_user(messages: Sequence[Message]) -> Messages:
    """The messages with the results of no call as messages of the user."""
    orphans = _results_of_no_call(messages)
    return [
        {"role": "user", "content": message["content"]} if place in orphans else message
        for place, message in enumerate(messages)
    ]


def _results_of_no_call(messages: Sequence[Message]) -> set[int]:
    orphans, called = set[int](), False
    for place, message in enumerate(messages):
        if message["role"] != "tool":
            called = bool(_calls_of(message))
        elif not called:
            orphans.add(place)
    return orphans


def left_out(messages: Sequence[Message], text: str) -> bool:
    """Whether a prompt lacks what some templates skip without a word: results of no call, and the system's message
    of a chat that has no other."""
    risky = [messages[place] for place in _results_of_no_call(messages)]
    if all(message["role"] == "system" for message in messages):
        risky += messages
    return any(not _stands_in(str(message["content"]).strip(), text) for message in risky)


def _stands_in(said: str, text: str) -> bool:
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


CHANGES = (
    hoist_results,
    developer_as_system,
    results_as_user,
    merge_adjacent,
    add_user_message,
    split_parallel_calls,
    stringify_arguments,
    fold_system_into_user,
)
"""Tried in order, each on the result of those before it. Many templates demand that user and assistant alternate, and
many clients send two user messages in a row. Others take one call at a time, concatenate arguments as strings, have no
system role, or no place for an image in the result of a tool. Some demand that a user begins, and clients that ask for
a title send a system prompt alone; some take no result of a call that was compacted away."""


def complete_tools(tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The tools with what the API leaves optional and some templates concatenate: a description and parameters."""
    completed = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        parameters = function.get("parameters")
        completed.append(
            {
                **tool,
                "function": {
                    **function,
                    "description": function.get("description") or "",
                    "parameters": _with_properties(parameters if isinstance(parameters, Mapping) else {}),
                },
            }
        )
    return completed


def _with_properties(parameters: Mapping[str, object]) -> dict[str, object]:
    properties = parameters.get("properties")
    described = {
        name: {"type": "string", "description": "", **schema} if isinstance(schema, Mapping) else {}
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
    }
    return {"type": "object", **parameters, "properties": described}
