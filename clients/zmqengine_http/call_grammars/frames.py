"""What stands around the arguments of a call, in the words of each format of `tool_calls/formats.py`.

A frame describes what follows the marker that starts calls, as the family's own chat template writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zmqengine_http.call_grammars.bare_text import bare_value, members
from zmqengine_http.call_grammars.lark import Function, Rules, one_of
from zmqengine_http.call_grammars.written_values import (
    FUNCTION_GEMMA,
    GEMMA,
    PYTHON,
    Style,
    WrittenValues,
    object_members,
)
from zmqengine_http.errors import bad_field
from zmqengine_http.tool_calls.formats import BAR, GAP, Format
from zmqengine_http.tool_calls.typed import resolved

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class Calls(NamedTuple):
    """What may be called, in which format. `several`: one call or more. `template` is the model's chat template."""

    format: Format
    functions: Sequence[Function]
    several: bool
    template: str


def frame(rules: Rules, calls: Calls) -> str | None:
    """The calls, from behind the marker that starts them; None for a format without a grammar. Raises a 400."""
    write = _FRAMES.get(calls.format.name)
    return write(rules, calls) if write else None


def _each(calls: Calls, write: Callable[[Function], str]) -> str:
    """Any of the functions."""
    return one_of(write(function) for function in calls.functions)


def _repeated(rules: Rules, calls: Calls, one: str, between: str) -> str:
    one = rules.rule(one)
    return f"{one} ({between} {one})*" if calls.several else one


def _json_call(rules: Rules, function: Function, word: str) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{word}": '
    return f"{rules.text(head)} {rules.arguments(function)} {rules.text('}')}"


def _json_tools(rules: Rules, calls: Calls) -> str:
    line, end = rules.text("\n"), rules.marker(calls.format.end)
    one = f"{line} {_each(calls, lambda function: _json_call(rules, function, 'arguments'))} {line} {end}"
    return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")


def _llama3_json(rules: Rules, calls: Calls) -> str:
    one = _each(calls, lambda function: _json_call(rules, function, "parameters"))
    return _repeated(rules, calls, one, rules.text("; "))


def _mistral(rules: Rules, calls: Calls) -> str:
    if "[ARGS]" in calls.template or rules.token("[ARGS]") is not None:
        arguments = rules.marker("[ARGS]")
        one = _each(
            calls,
            lambda function: f"{rules.text(function.name)} {arguments} {rules.arguments(function)}",
        )
        return _repeated(rules, calls, one, rules.marker(calls.format.start))
    one = _each(calls, lambda function: _json_call(rules, function, "arguments"))
    return f'" "? "[" {_repeated(rules, calls, one, rules.text(", "))} "]"'


def _qwen3_coder(rules: Rules, calls: Calls) -> str:
    line = rules.text("\n")

    def write(function: Function) -> str:
        parts = [rules.text(f"<function={function.name}>\n")]
        for name, schema, needed in members(rules, function):
            value = bare_value(rules, function, schema, "\n</parameter>")
            parameter = rules.rule(
                f"{rules.text(f'<parameter={_tag_name(function, name)}>' + chr(10))} {value} {line}"
            )
            parts.append(parameter if needed else f"{parameter}?")
        return " ".join([*parts, rules.text("</function>\n")])

    one = f"{line} {_each(calls, write)} {rules.marker(calls.format.end)}"
    return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")


def _minimax(rules: Rules, calls: Calls) -> str:
    line = rules.text("\n")

    def write(function: Function) -> str:
        parts = [rules.text(f'<invoke name="{function.name}">\n')]
        for name, schema, needed in members(rules, function):
            value = bare_value(rules, function, schema, "</parameter>")
            head = rules.text(f'<parameter name="{_tag_name(function, name)}">')
            parameter = rules.rule(f"{head} {value} {line}")
            parts.append(parameter if needed else f"{parameter}?")
        return " ".join([*parts, rules.text("</invoke>\n")])

    one = _each(calls, write)
    return f"{line} {_repeated(rules, calls, one, '')} {rules.marker(calls.format.end)}"


def _glm(rules: Rules, calls: Calls) -> str:
    # Some of the family break lines between the tags, others do not.
    line = rules.rule(f"{rules.text(chr(10))}?")
    key, key_end, value_start = map(rules.marker, ("<arg_key>", "</arg_key>", "<arg_value>"))

    def write(function: Function) -> str:
        parts = [rules.text(function.name), line]
        for name, schema, needed in members(rules, function):
            value = bare_value(rules, function, schema, "</arg_value>")
            argument = rules.rule(
                f"{key} {rules.text(_tag_name(function, name))} {key_end} {line} {value_start} {value} {line}"
            )
            parts.append(argument if needed else f"{argument}?")
        return " ".join(parts)

    one = f"{_each(calls, write)} {rules.marker(calls.format.end)}"
    return _repeated(rules, calls, one, f"{line} {rules.marker(calls.format.start)}")


def _gemma(style: Style) -> Callable[[Rules, Calls], str]:
    def write_all(rules: Rules, calls: Calls) -> str:
        def write(function: Function) -> str:
            values = WrittenValues(rules, function, style)
            parameters = resolved(function.parameters, function.parameters)
            inside = values.members(object_members(parameters), values.key)
            return f"{rules.text(f'call:{function.name}{{')} {inside} {rules.text('}')}"

        end, start = rules.marker(calls.format.end), rules.marker(calls.format.start)
        return _repeated(rules, calls, f"{_each(calls, write)} {end}", start)

    return write_all


def _pythonic(rules: Rules, calls: Calls) -> str:
    def write(function: Function) -> str:
        values = WrittenValues(rules, function, PYTHON)
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
        inside = values.members(named, lambda name: rules.text(f"{name}="))
        return f"{rules.text(f'{function.name}(')} {inside} {rules.text(')')}"

    one = _each(calls, write)
    return f'"[" {_repeated(rules, calls, one, rules.text(", "))} "]" {rules.marker(calls.format.end)}'


def _kimi(rules: Rules, calls: Calls) -> str:
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


def _deepseek(rules: Rules, calls: Calls) -> str:
    begin, end = (rules.marker(f"<{BAR}tool{GAP}call{GAP}{word}{BAR}>") for word in ("begin", "end"))
    separator = rules.marker(f"<{BAR}tool{GAP}sep{BAR}>")
    fenced = "```json" in calls.template

    def write(function: Function) -> str:
        if fenced:
            head = f"{rules.text('function')} {separator} {rules.text(f'{function.name}{chr(10)}```json{chr(10)}')}"
            return f"{begin} {head} {rules.arguments(function)} {rules.text(chr(10) + '```')} {end}"
        return f"{begin} {rules.text(function.name)} {separator} {rules.arguments(function)} {end}"

    between = rules.text("\n") if fenced else ""
    return f"{_repeated(rules, calls, _each(calls, write), between)} {rules.marker(calls.format.end)}"


def _tag_name(function: Function, name: str) -> str:
    if re.search(r"""["'<>\s]""", name) or not name:
        raise bad_field(
            "tools", f"{function.name}: {name[:100]!r} cannot stand in a tag, where this model writes it"
        )
    return name


_FRAMES: dict[str, Callable[[Rules, Calls], str]] = {
    "json_tools": _json_tools,
    "longcat": _json_tools,
    "qwen3_coder": _qwen3_coder,
    "minimax_m2": _minimax,
    "mistral": _mistral,
    "llama3_json": _llama3_json,
    "glm47": _glm,
    "gemma4": _gemma(GEMMA),
    "function_gemma": _gemma(FUNCTION_GEMMA),
    "pythonic": _pythonic,
    "kimi_k2": _kimi,
    "deepseek_v3": _deepseek,
}
