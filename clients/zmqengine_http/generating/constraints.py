"""The grammar constraint of a chat, from its tools, tool choice and response format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Constraint
from zmqengine_http.call_grammars.answer_grammar import AnswerForms, answer_grammar
from zmqengine_http.call_grammars.frames import WITHOUT_GRAMMAR
from zmqengine_http.call_grammars.lark import GrammarRules, OfferedFunction, too_long_grammar
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model

Tools = Sequence[Mapping[str, object]]


class OutputRules(Struct, frozen=True, kw_only=True):
    """The parts of a request that restrict its output, in the form of OpenAI's chat completions.

    `explicit` is a constraint given directly, by vLLM's fields. `every_call`: calls of tools that are not
    strict follow their schemas too.
    """

    tools: Tools
    tool_choice: str | Mapping[str, object]
    parallel: bool
    response_format: Mapping[str, object]
    explicit: Constraint | None = None
    every_call: bool = False


class OutputConstraint(NamedTuple):
    """The constraint on an output, if any, and the schema keywords that it does not enforce."""

    constraint: Constraint | None
    unenforced: Sequence[str] = ()


def check_constraints(tool_choice: str | Mapping[str, object], response_format: Mapping[str, object]) -> None:
    """Raise a 400 for a tool choice or a response format that is invalid for any model."""
    _forced(tool_choice)
    _schema(response_format)


def make_constraint(model: Model, prompt: Prompt, rules: OutputRules) -> OutputConstraint:
    """The constraint that a chat puts on its output.

    A forced tool takes precedence over a response format: its call is the output. With tools that may be
    called, a response format is one of two forms the output may have. Where the template has opened the
    reasoning, the constraint begins after it. Raises a 400 for what this model or its worker cannot enforce.
    """
    forced, schema, explicit = _forced(rules.tool_choice), _schema(rules.response_format), rules.explicit
    if explicit is not None and (schema is not None or forced is not None):
        raise bad_field("response_format", "is given beside another constraint: ask for one")
    forms = _forms(model, rules, forced, schema, prompt)
    unenforced: set[str] = set()
    if schema is not None and forced is None and _is_lenient(schema):
        unenforced |= unenforced_keywords(schema)
    if forms is not None:
        grammar = GrammarRules(model.tokenizer)
        template = model.tokenizer.template_for(tools=bool(rules.tools)) or ""
        constraint = Constraint("lark", answer_grammar(grammar, model.markers, template, forms))
        unenforced |= grammar.unenforced
    elif schema is not None:
        constraint = Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
    elif explicit is not None:
        constraint = explicit
    else:
        unenforced_strict = ["strict"] if _some_strict(rules) and not _can_constrain_calls(model) else []
        return OutputConstraint(None, unenforced_strict)
    _check_worker(model, constraint, "response_format" if forced is None else "tool_choice")
    if prompt.reasoning_open:
        after = model.tokenizer.encode(model.markers.think_end, add_special_tokens=False)
        constraint = msgspec.structs.replace(constraint, after=after)
    return OutputConstraint(constraint, sorted(unenforced))


def _forms(
    model: Model, rules: OutputRules, forced: str | None, schema: Mapping[str, object] | None, prompt: Prompt
) -> AnswerForms | None:
    """The forms of an output that needs a grammar of its own (calls, or JSON in a channel); None
    otherwise."""
    reasoned = prompt.reasoning_open
    if forced is not None:
        functions = _functions(rules.tools, forced)
        return AnswerForms(functions, rules.parallel and not forced, reasoned=reasoned)
    may_call = rules.tool_choice == "auto" and bool(rules.tools) and rules.explicit is None
    if schema is not None:
        if may_call and _can_constrain_calls(model):
            return AnswerForms(_functions(rules.tools, ""), rules.parallel, schema=schema, reasoned=reasoned)
        return AnswerForms(schema=schema, reasoned=reasoned) if model.markers.harmony else None
    if may_call and (_some_strict(rules) or rules.every_call) and _can_constrain_calls(model):
        return AnswerForms(_functions(rules.tools, ""), rules.parallel, text=True, reasoned=reasoned)
    return None


def _can_constrain_calls(model: Model) -> bool:
    """Whether the worker has constraints and the model's call format has a grammar."""
    calls = model.markers.calls
    known = model.markers.harmony or (calls is not None and calls.name not in WITHOUT_GRAMMAR)
    return bool(model.limits.constraints) and known


def _some_strict(rules: OutputRules) -> bool:
    return rules.tool_choice == "auto" and any(function.strict for function in _all_functions(rules.tools))


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
        # Not strict: keywords that a grammar cannot enforce are skipped instead of refused.
        schema = {**schema, "x-guidance": {"lenient": True}}
    return schema


def _is_lenient(schema: Mapping[str, object]) -> bool:
    options = schema.get("x-guidance")
    return isinstance(options, Mapping) and bool(options.get("lenient"))


def _forced(tool_choice: str | Mapping[str, object]) -> str | None:
    """The name of the one tool that must be called, an empty string for any tool, None for a free choice."""
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


def _functions(tools: Tools, name: str) -> list[OfferedFunction]:
    functions = [function for function in _all_functions(tools) if not name or function.name == name]
    if not functions:
        what = f"there is no tool {name[:100]!r}" if name else "there are no tools"
        raise bad_field("tool_choice", what)
    return functions


def _all_functions(tools: Tools) -> list[OfferedFunction]:
    functions = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        parameters = function.get("parameters")
        functions.append(
            OfferedFunction(
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
        raise too_long_grammar(param)
