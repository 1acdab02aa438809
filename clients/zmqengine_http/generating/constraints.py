"""What asks for constrained output, as a constraint that the worker enforces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Constraint
from zmqengine_http.call_grammars.answers import Wanted, answer_grammar
from zmqengine_http.call_grammars.frames import WITHOUT_GRAMMAR
from zmqengine_http.call_grammars.lark import Function, Rules
from zmqengine_http.call_grammars.schema_keywords import passed_over
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model

Tools = Sequence[Mapping[str, object]]


class Wishes(Struct, frozen=True, kw_only=True):
    """What of a request says what the answer must be; tools, choice and format in the shapes of chat completions.

    `asked` is what was asked for in other words; `every_call`: also calls of tools that are not strict follow their
    schemas.
    """

    tools: Tools
    tool_choice: str | Mapping[str, object]
    parallel: bool
    response_format: Mapping[str, object]
    asked: Constraint | None = None
    every_call: bool = False


class Held(NamedTuple):
    """What an answer is held to, if to anything, and the keywords of schemas that are not enforced."""

    constraint: Constraint | None
    unenforced: Sequence[str] = ()


def check_constraints(tool_choice: str | Mapping[str, object], response_format: Mapping[str, object]) -> None:
    """Raise a 400 for what no model could be held to. Both are in the shapes of chat completions."""
    _forced(tool_choice)
    _schema(response_format)


def make_constraint(model: Model, prompt: Prompt, wishes: Wishes) -> Held:
    """What the answer to `prompt` must be.

    A forced tool wins over a format: its call is the answer. Beside tools that may be called a format is one of two
    ways to answer. Where the template has opened the reasoning, the constraint begins after it. Raises a 400 for what
    this model or its worker cannot do.
    """
    forced, schema = _forced(wishes.tool_choice), _schema(wishes.response_format)
    if wishes.asked is not None and (schema is not None or forced is not None):
        raise bad_field("response_format", "is given beside another constraint: ask for one")
    rules = Rules(model.tokenizer)
    wanted = _wanted(model, wishes, forced, schema, prompt)
    if schema is not None and forced is None and _is_lenient(schema):
        rules.unenforced |= passed_over(schema)
    if wanted is not None:
        template = model.tokenizer.template_for(tools=bool(wishes.tools)) or ""
        constraint = Constraint("lark", answer_grammar(rules, model.markers, template, wanted))
    elif schema is not None:
        constraint = Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
    elif wishes.asked is not None:
        constraint = wishes.asked
    else:
        unheld = ["strict"] if _some_strict(wishes) and _calls_are_free(model) else []
        return Held(None, unheld)
    _check_worker(model, constraint, "response_format" if forced is None else "tool_choice")
    if prompt.reasoning_open:
        after = model.tokenizer.encode(model.markers.think_end, add_special_tokens=False)
        constraint = msgspec.structs.replace(constraint, after=after)
    return Held(constraint, sorted(rules.unenforced))


def _wanted(
    model: Model, wishes: Wishes, forced: str | None, schema: Mapping[str, object] | None, prompt: Prompt
) -> Wanted | None:
    """What needs a grammar of its own: calls, and JSON in a channel; None for all else."""
    reasoned = prompt.reasoning_open
    if forced is not None:
        functions = _functions(wishes.tools, forced)
        return Wanted(functions, wishes.parallel and not forced, reasoned=reasoned)
    may_call = wishes.tool_choice == "auto" and bool(wishes.tools) and wishes.asked is None
    if schema is not None:
        if may_call and not _calls_are_free(model):
            return Wanted(_functions(wishes.tools, ""), wishes.parallel, schema=schema, reasoned=reasoned)
        return Wanted(schema=schema, reasoned=reasoned) if model.markers.harmony else None
    if may_call and (_some_strict(wishes) or wishes.every_call) and not _calls_are_free(model):
        return Wanted(_functions(wishes.tools, ""), wishes.parallel, text=True, reasoned=reasoned)
    return None


def _calls_are_free(model: Model) -> bool:
    """Whether calls that the model may make cannot be held to anything."""
    calls = model.markers.calls
    known = model.markers.harmony or (calls is not None and calls.name not in WITHOUT_GRAMMAR)
    return not model.limits.constraints or not known


def _some_strict(wishes: Wishes) -> bool:
    return wishes.tool_choice == "auto" and any(function.strict for function in _all_functions(wishes.tools))


def _schema(response_format: Mapping[str, object]) -> Mapping[str, object] | None:
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
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
    return schema


def _is_lenient(schema: Mapping[str, object]) -> bool:
    options = schema.get("x-guidance")
    return isinstance(options, Mapping) and bool(options.get("lenient"))


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


def _functions(tools: Tools, name: str) -> list[Function]:
    found = [function for function in _all_functions(tools) if not name or function.name == name]
    if not found:
        what = f"there is no tool {name[:100]!r}" if name else "there are no tools"
        raise bad_field("tool_choice", what)
    return found


def _all_functions(tools: Tools) -> list[Function]:
    functions = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        parameters = function.get("parameters")
        functions.append(
            Function(
                str(function["name"]),
                parameters if isinstance(parameters, Mapping) else {},
                bool(function.get("strict")),
            )
        )
    return functions


def _check_worker(model: Model, constraint: Constraint, param: str) -> None:
    if not model.limits.constraints:
        raise bad_field(param, "this worker cannot hold a model to it", code="unsupported_value")
    if len(constraint.text) > CONSTRAINT_CHARS_MAX:
        raise bad_field(param, f"over {CONSTRAINT_CHARS_MAX} characters as a grammar: shorten the schemas")
