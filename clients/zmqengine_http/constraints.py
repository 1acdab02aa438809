"""What asks for constrained output, as a constraint that the worker enforces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Constraint
from zmqengine_http.errors import ApiError, bad_field
from zmqengine_http.prompts import Prompt
from zmqengine_http.tool_calls.formats import FORMATS
from zmqengine_http.worker import Model

Tools = Sequence[Mapping[str, object]]


def check_constraints(tool_choice: str | Mapping[str, object], response_format: Mapping[str, object]) -> None:
    """Raise a 400 for what no model could be held to. Both are in the shapes of chat completions."""
    _forced(tool_choice)
    _format(response_format)


def make_constraint(
    model: Model,
    prompt: Prompt,
    *,
    tools: Tools,
    tool_choice: str | Mapping[str, object],
    parallel: bool,
    response_format: Mapping[str, object],
    asked: Constraint | None = None,
) -> Constraint | None:
    """What the answer to `prompt` must be, or None if it is free. `asked` is what was asked for in other words.

    A forced tool wins over a format: its call is the answer. Where the template has opened the reasoning, the
    constraint begins after it. Raises a 400 for what this model or its worker cannot do.
    """
    forced = _forced(tool_choice)
    constraint = _format(response_format)
    if asked is not None and (constraint or forced is not None):
        raise bad_field("response_format", "is given beside another constraint: ask for one")
    constraint = constraint or asked
    if forced is not None:
        calls = _calls(model, _named(tools, forced), parallel and not forced)
        constraint = Constraint("lark", f"start: {calls}")
    elif constraint is None and tool_choice == "auto" and _wants_strict_calls(model, tools):
        # Free text, which cannot hold the special token that starts a call; then calls by their schemas.
        constraint = Constraint(
            "lark",
            f"start: TEXT? calls?\nTEXT: /(.|\\n)+/\ncalls: {_calls(model, _named(tools, ''), parallel)}",
        )
    if constraint is None:
        return None
    if not model.limits.constraints:
        raise bad_field(
            "response_format" if forced is None else "tool_choice",
            "this worker cannot hold a model to it",
            code="unsupported_value",
        )
    if len(constraint.text) > CONSTRAINT_CHARS_MAX:
        raise bad_field(
            "response_format", f"over {CONSTRAINT_CHARS_MAX} characters of JSON: shorten the schema"
        )
    if prompt.reasoning_open:
        after = model.tokenizer.encode(model.markers.think_end, add_special_tokens=False)
        constraint = msgspec.structs.replace(constraint, after=after)
    return constraint


def _format(response_format: Mapping[str, object]) -> Constraint | None:
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json")
    if kind != "json_schema":
        raise bad_field(
            "response_format", "type must be text, json_object or json_schema", code="unsupported_value"
        )
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise bad_field("response_format", "json_schema.schema must be a JSON schema")
    assert isinstance(named, dict)
    if not named.get("strict"):
        # What the schema asks for and a grammar cannot have is passed over: the caller did not insist.
        schema = {**schema, "x-guidance": {"lenient": True}}
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False))


def _forced(tool_choice: str | Mapping[str, object]) -> str | None:
    """None for a free choice, the name of the one tool that must be called, or an empty text for any."""
    if tool_choice in ("none", "auto"):
        return None
    if tool_choice in ("required", "any"):
        return ""
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise bad_field(
            "tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        )
    return name


def _named(tools: Tools, name: str) -> list[Mapping[str, object]]:
    functions = [tool["function"] for tool in tools]
    found = [
        function
        for function in functions
        if isinstance(function, Mapping) and (not name or function["name"] == name)
    ]
    if not found:
        what = f"there is no tool {name[:100]!r}" if name else "there are no tools"
        raise bad_field("tool_choice", what)
    return found


def _calls(model: Model, functions: Sequence[Mapping[str, object]], several: bool) -> str:
    """The rest of a Lark rule, and the rules it needs: one call or several, in the model's own format."""
    calls = model.markers.calls
    if calls is None or calls.parse is not FORMATS["json_tools"].parse or not calls.start or not calls.end:
        raise _cannot_force()
    start, end = (_literal(model, text) for text in (calls.start, calls.end))
    alternatives = "\n".join(
        f"call_{place}: %json {json.dumps(_call_schema(function), ensure_ascii=False)}"
        for place, function in enumerate(functions)
    )
    which = " | ".join(f"call_{place}" for place in range(len(functions)))
    more = ' ("\\n" one)*' if several else ""
    return f'one{more}\none: {start} "\\n" ({which}) "\\n" {end}\n{alternatives}\n'


def _wants_strict_calls(model: Model, tools: Tools) -> bool:
    """Whether a tool is strict, and the model's calls begin with a token of their own: text cannot look like them."""
    functions = [tool["function"] for tool in tools]
    strict = any(isinstance(function, Mapping) and function.get("strict") for function in functions)
    calls = model.markers.calls
    return (
        strict
        and model.limits.constraints
        and calls is not None
        and calls.parse is FORMATS["json_tools"].parse
        and _literal(model, calls.start).startswith("<[")
    )


def _call_schema(function: Mapping[str, object]) -> dict[str, object]:
    parameters = function.get("parameters")
    arguments: dict[str, object] = dict(parameters) if isinstance(parameters, Mapping) and parameters else {}
    # References in a schema are looked up at its root.
    definitions: dict[str, object] = {
        name: arguments.pop(name) for name in ("$defs", "definitions") if name in arguments
    }
    arguments.setdefault("type", "object")
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?", "lenient": not function.get("strict")},
        **definitions,
    }
    return schema


def _literal(model: Model, text: str) -> str:
    """A marker in a grammar: by its id where it is a token of its own, or look-alike text would do."""
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    is_special = len(ids) == 1 and not model.tokenizer.decode(ids, skip_special_tokens=True)
    return f"<[{ids[0]}]>" if is_special else json.dumps(text)


def _cannot_force() -> ApiError:
    return bad_field(
        "tool_choice",
        "a tool cannot be forced in the format in which this model writes its calls",
        code="unsupported_value",
    )
