"""Grammars of calls, by format: the syntax around their arguments.

A frame describes the text after the marker that starts calls, as the family's own chat template writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zmqengine_http.call_grammars.lark import GrammarRules, OfferedFunction, alternation
from zmqengine_http.call_grammars.literal_values import (
    FUNCTION_GEMMA,
    GEMMA,
    PYTHON,
    LiteralStyle,
    LiteralValues,
    object_members,
)
from zmqengine_http.call_grammars.tagged_values import members, tagged_json, tagged_text
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.tool_calls.call_format import CallFormat
from zmqengine_http.tool_calls.json_formats import BAR, GAP
from zmqengine_http.tool_calls.markers import FORMATS
from zmqengine_http.tool_calls.schema_types import resolved, types_of

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class OfferedCalls(NamedTuple):
    """The functions that may be called, and the format; `several`: one call or more. `template`: the chat
    template."""

    format: CallFormat
    functions: Sequence[OfferedFunction]
    several: bool
    template: str


def frame(rules: GrammarRules, calls: OfferedCalls) -> str | None:
    """The calls, after the marker that starts them; None for a format without a grammar. Raises a 400."""
    write = _FRAMES.get(calls.format.name)
    return write(rules, calls) if write else None


def _each(calls: OfferedCalls, write: Callable[[OfferedFunction], str]) -> str:
    """The alternation of a call of each function."""
    return alternation(write(function) for function in calls.functions)


def _repeated(rules: GrammarRules, calls: OfferedCalls, one: str, between: str) -> str:
    one = rules.rule(one)
    return f"{one} ({between} {one})*" if calls.several else one


def _json_call(rules: GrammarRules, function: OfferedFunction, word: str) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{word}": '
    return f"{rules.text(head)} {rules.arguments(function)} {rules.text('}')}"


def _json_tools(rules: GrammarRules, calls: OfferedCalls) -> str:
    line, end = rules.text("\n"), rules.marker(calls.format.end)
    one = f"{line} {_each(calls, lambda function: _json_call(rules, function, 'arguments'))} {line} {end}"
    return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")


def _listed(rules: GrammarRules, calls: OfferedCalls, one: str) -> str:
    """A bracketed list of calls, on one line or on one line each."""
    space = rules.rule(rules.expression("\\n? {0,4}"))
    return f'"[" {space} {_repeated(rules, calls, one, f"{rules.text(chr(44))} {space}")} {space} "]"'


def _json_in_list(rules: GrammarRules, calls: OfferedCalls) -> str:
    one = _each(calls, lambda function: _json_call(rules, function, "arguments"))
    end = f" {rules.marker(calls.format.end)}" if calls.format.end else ""
    return f"{_listed(rules, calls, one)}{end}"


def _json_list(rules: GrammarRules, calls: OfferedCalls) -> str:
    line, end = rules.text("\n"), rules.marker(calls.format.end)
    one = _each(calls, lambda function: _json_call(rules, function, "arguments"))
    # MiniMax M1 has each call on a line of its own.
    lines = f"{line} {_repeated(rules, calls, one, line)} {line}"
    return f"({_listed(rules, calls, one)} | {lines}) {end}"


def _cohere(rules: GrammarRules, calls: OfferedCalls) -> str:
    def write(function: OfferedFunction) -> str:
        name = rules.text(f'", "tool_name": {json.dumps(function.name)}, "parameters": ')
        return f"{rules.text(opening)} {number} {name} {rules.arguments(function)} {rules.text('}')}"

    opening, number = '{"tool_call_id": "', rules.expression("[0-9]{1,3}")
    return f"{_listed(rules, calls, _each(calls, write))} {rules.marker(calls.format.end)}"


def _apertus(rules: GrammarRules, calls: OfferedCalls) -> str:
    def write(function: OfferedFunction) -> str:
        return (
            f"{rules.text(f'{{{json.dumps(function.name)}: ')} {rules.arguments(function)} {rules.text('}')}"
        )

    return f"{_listed(rules, calls, _each(calls, write))} {rules.marker(calls.format.end)}"


def _internlm(rules: GrammarRules, calls: OfferedCalls) -> str:
    call = _each(calls, lambda function: _json_call(rules, function, "arguments"))
    one = f"{rules.text(chr(10))} {call} {rules.marker(calls.format.end)}"
    return _repeated(rules, calls, one, rules.marker(calls.format.start))


def _one_json(rules: GrammarRules, calls: OfferedCalls) -> str:
    return _each(calls, lambda function: _json_call(rules, function, "arguments"))


def _llama4_json(rules: GrammarRules, calls: OfferedCalls) -> str:
    one = _each(calls, lambda function: _json_call(rules, function, "parameters"))
    return _repeated(rules, calls, one, "")


def _llama3_json(rules: GrammarRules, calls: OfferedCalls) -> str:
    one = _each(calls, lambda function: _json_call(rules, function, "parameters"))
    return _repeated(rules, calls, one, rules.text("; "))


def _mistral(rules: GrammarRules, calls: OfferedCalls) -> str:
    if "[ARGS]" in calls.template or rules.token("[ARGS]") is not None:
        arguments = rules.marker("[ARGS]")
        one = _each(
            calls,
            lambda function: f"{rules.text(function.name)} {arguments} {rules.arguments(function)}",
        )
        return _repeated(rules, calls, one, rules.marker(calls.format.start))
    one = _each(calls, lambda function: _json_call(rules, function, "arguments"))
    return f'" "? "[" {_repeated(rules, calls, one, rules.text(", "))} "]"'


def _with_parameters(
    rules: GrammarRules,
    function: OfferedFunction,
    opening: str,
    closing: str,
    write: Callable[[str, object], str],
) -> str:
    """The tags of a function around its parameters, one per line; `write` gets a parameter's name and
    schema."""
    line = rules.text("\n")
    parts = [rules.text(opening)]
    for name, schema, needed in members(rules, function):
        parameter = rules.rule(f"{write(_tag_name(function, name), schema)} {line}")
        parts.append(parameter if needed else f"{parameter}?")
    return " ".join([*parts, rules.text(closing)])


def _function_tags(padding: str) -> Callable[[GrammarRules, OfferedCalls], str]:
    """The frame of formats with `<function=NAME>` and `<parameter=NAME>` tags, with `padding` around
    values."""

    def write_all(rules: GrammarRules, calls: OfferedCalls) -> str:
        line = rules.text("\n")

        def write(function: OfferedFunction) -> str:
            def parameter(name: str, schema: object) -> str:
                value = tagged_text(rules, function, schema, f"{padding}</parameter>")
                return f"{rules.text(f'<parameter={name}>{padding}')} {value}"

            opening = f"<function={function.name}>\n"
            return _with_parameters(rules, function, opening, "</function>\n", parameter)

        one = f"{line} {_each(calls, write)} {rules.marker(calls.format.end)}"
        return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")

    return write_all


def _dsml(rules: GrammarRules, calls: OfferedCalls) -> str:
    line, mark = rules.text("\n"), f"{BAR}DSML{BAR}"

    def write(function: OfferedFunction) -> str:
        def parameter(name: str, schema: object) -> str:
            # A value that may be a string or another type is written as JSON.
            text = types_of(schema, function.parameters) == {"string"}
            value = (tagged_text if text else tagged_json)(rules, function, schema, f"</{mark}parameter>")
            kind = "true" if text else "false"
            head = rules.text(f'<{mark}parameter name="{name}" string="{kind}">')
            return f"{head} {value}"

        opening = f'<{mark}invoke name="{function.name}">\n'
        return _with_parameters(rules, function, opening, f"</{mark}invoke>\n", parameter)

    return f"{line} {_repeated(rules, calls, _each(calls, write), '')} {rules.marker(calls.format.end)}"


def _minimax(rules: GrammarRules, calls: OfferedCalls) -> str:
    line = rules.text("\n")

    def write(function: OfferedFunction) -> str:
        def parameter(name: str, schema: object) -> str:
            value = tagged_text(rules, function, schema, "</parameter>")
            head = rules.text(f'<parameter name="{name}">')
            return f"{head} {value}"

        opening = f'<invoke name="{function.name}">\n'
        return _with_parameters(rules, function, opening, "</invoke>\n", parameter)

    one = _each(calls, write)
    return f"{line} {_repeated(rules, calls, one, '')} {rules.marker(calls.format.end)}"


def _glm(rules: GrammarRules, calls: OfferedCalls) -> str:
    # Only some models of the family write line breaks between the tags.
    line = rules.rule(f"{rules.text(chr(10))}?")
    key, key_end, value_start = map(rules.marker, ("<arg_key>", "</arg_key>", "<arg_value>"))

    def write(function: OfferedFunction) -> str:
        parts = [rules.text(function.name), line]
        for name, schema, needed in members(rules, function):
            value = tagged_text(rules, function, schema, "</arg_value>")
            argument = rules.rule(
                f"{key} {rules.text(_tag_name(function, name))} {key_end} {line} {value_start} {value} {line}"
            )
            parts.append(argument if needed else f"{argument}?")
        return " ".join(parts)

    one = f"{_each(calls, write)} {rules.marker(calls.format.end)}"
    return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")


def _gemma(style: LiteralStyle) -> Callable[[GrammarRules, OfferedCalls], str]:
    def write_all(rules: GrammarRules, calls: OfferedCalls) -> str:
        def write(function: OfferedFunction) -> str:
            values = LiteralValues(rules, function, style)
            parameters = resolved(function.parameters, function.parameters)
            inside = values.arguments(object_members(parameters), values.key)
            return f"{rules.text(f'call:{function.name}{{')} {inside} {rules.text('}')}"

        end, start = rules.marker(calls.format.end), rules.marker(calls.format.start)
        return _repeated(rules, calls, f"{_each(calls, write)} {end}", start)

    return write_all


def _python_calls(rules: GrammarRules, calls: OfferedCalls, between: str) -> str:
    def write(function: OfferedFunction) -> str:
        values = LiteralValues(rules, function, PYTHON)
        parameters = resolved(function.parameters, function.parameters)
        named = [
            (name, schema, needed)
            for name, schema, needed in object_members(parameters)
            if needed or _IDENTIFIER.fullmatch(name)
        ]
        for name, _, _ in named:
            if not _IDENTIFIER.fullmatch(name):
                raise bad_field(
                    "tools", f"{function.name}: {name[:100]!r} cannot be the name of an argument in Python"
                )
        inside = values.arguments(named, lambda name: rules.text(f"{name}="))
        return f"{rules.text(f'{function.name}(')} {inside} {rules.text(')')}"

    return _repeated(rules, calls, _each(calls, write), rules.text(between))


def _pythonic(rules: GrammarRules, calls: OfferedCalls) -> str:
    return f'"[" {_python_calls(rules, calls, ", ")} "]" {rules.marker(calls.format.end)}'


def _olmo(rules: GrammarRules, calls: OfferedCalls) -> str:
    return f"{_python_calls(rules, calls, chr(10))} {rules.marker(calls.format.end)}"


def _kimi(rules: GrammarRules, calls: OfferedCalls) -> str:
    begin, arguments, end = (
        rules.marker(f"<|tool_call_{word}|>") for word in ("begin", "argument_begin", "end")
    )
    number = rules.expression("[0-9]{1,3}")
    one = _each(
        calls,
        lambda function: (
            f"{begin} {rules.text(f'functions.{function.name}:')} {number} {arguments} "
            f"{rules.arguments(function)} {end}"
        ),
    )
    return f"{_repeated(rules, calls, one, '')} {rules.marker(calls.format.end)}"


def _deepseek(rules: GrammarRules, calls: OfferedCalls) -> str:
    begin, end = (rules.marker(f"<{BAR}tool{GAP}call{GAP}{word}{BAR}>") for word in ("begin", "end"))
    separator = rules.marker(f"<{BAR}tool{GAP}sep{BAR}>")
    fenced = "```json" in calls.template

    def write(function: OfferedFunction) -> str:
        if fenced:
            head = f"{rules.text('function')} {separator} {rules.text(f'{function.name}{chr(10)}```json{chr(10)}')}"
            return f"{begin} {head} {rules.arguments(function)} {rules.text(chr(10) + '```')} {end}"
        return f"{begin} {rules.text(function.name)} {separator} {rules.arguments(function)} {end}"

    between = rules.text("\n") if fenced else ""
    return f"{_repeated(rules, calls, _each(calls, write), between)} {rules.marker(calls.format.end)}"


def _tag_name(function: OfferedFunction, name: str) -> str:
    if re.search(r"""["'<>\s]""", name) or not name:
        raise bad_field(
            "tools", f"{function.name}: {name[:100]!r} cannot stand in a tag, where this model writes it"
        )
    return name


_FRAMES: dict[str, Callable[[GrammarRules, OfferedCalls], str]] = {
    "json_tools": _json_tools,
    "json_list": _json_list,
    "longcat": _json_tools,
    "nemotron": _json_in_list,
    "phi4_mini": _json_in_list,
    "granite": _json_in_list,
    "internlm2": _internlm,
    "gigachat3": _one_json,
    "cohere": _cohere,
    "apertus": _apertus,
    "mistral": _mistral,
    "llama3_json": _llama3_json,
    "llama4_json": _llama4_json,
    "qwen3_coder": _function_tags("\n"),
    "seed_oss": _function_tags(""),
    "minimax_m2": _minimax,
    "deepseek_v32": _dsml,
    "deepseek_v4": _dsml,
    "glm47": _glm,
    "laguna": _glm,
    "gemma4": _gemma(GEMMA),
    "function_gemma": _gemma(FUNCTION_GEMMA),
    "pythonic": _pythonic,
    "olmo3": _olmo,
    "kimi_k2": _kimi,
    "deepseek_v3": _deepseek,
}
WITHOUT_GRAMMAR = frozenset(FORMATS) - frozenset(_FRAMES)
"""Formats that are parsed but have no grammar: their calls are not constrained, and forcing one is a 400."""
