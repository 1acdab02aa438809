"""Answers as grammars: calls alone, text with calls behind it, JSON, or what of these the model chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqengine_http.call_grammars.frames import Calls, frame
from zmqengine_http.call_grammars.harmony import channel_answer, channel_call, channel_start
from zmqengine_http.call_grammars.lark import Function, Rules
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.tool_calls import Format, Markers


class Wanted(NamedTuple):
    """What an answer may be. Without `text` and `schema` it is a call; `several`: or more of them.

    `reasoned`: the template has opened the reasoning, and the grammar begins behind it.
    """

    functions: Sequence[Function] = ()
    several: bool = True
    text: bool = False
    schema: Mapping[str, object] | None = None
    reasoned: bool = False


def answer_grammar(rules: Rules, markers: Markers, template: str, wanted: Wanted) -> str:
    """The grammar of an answer. Raises a 400 where the model's format of calls has none."""
    if markers.harmony:
        return rules.grammar(_harmony(rules, wanted))
    line = f"{rules.expression(chr(92) + 'n{1,2}')}? " if wanted.reasoned else ""
    if not wanted.functions:
        assert wanted.schema is not None
        return rules.grammar(line + _json(rules, wanted.schema))
    calls = markers.calls
    inside = frame(rules, Calls(calls, wanted.functions, wanted.several, template)) if calls else None
    if calls is None or inside is None:
        raise cannot_force(calls.name if calls else "")
    inside = rules.rule(inside)
    start = rules.marker(calls.start)
    if wanted.schema is not None:
        return rules.grammar(f"{line}({_json(rules, wanted.schema)} | {start} {inside})")
    if not wanted.text:
        return rules.grammar(f"{line}{inside if calls.bare else f'{start} {inside}'}")
    return rules.grammar(_thought(rules, markers, wanted) + _text_then_calls(rules, calls, inside))


def cannot_force(name: str) -> Exception:
    """A 400 for a format of calls that has no grammar."""
    format_ = f"the format {name!r}" if name else "a format that this server does not know"
    return bad_field(
        "tool_choice",
        f"this model writes its calls in {format_}, which cannot be constrained",
        code="unsupported_value",
    )


def _text_then_calls(rules: Rules, calls: Format, inside: str) -> str:
    start = calls.start
    free = rules.without([start])
    if calls.bare:
        # What begins like an object would be read as a call.
        text = rules.without([start], r"[^\s{](?s:.)*")
        return f"({text} | {inside} | {text}? {rules.marker(start)} {inside})?"
    if rules.token(start) is not None:
        return f"{free}? ({rules.marker(start)} {inside})?"
    return f"({free} | {rules.up_to(start)} {inside})?"


def _thought(rules: Rules, markers: Markers, wanted: Wanted) -> str:
    """Reasoning that the model itself begins."""
    if not markers.think_start or wanted.reasoned:
        return ""
    if rules.token(markers.think_start) is None or rules.token(markers.think_end) is None:
        return ""
    return f"({rules.marker(markers.think_start)} {rules.up_to(markers.think_end)})? "


def _json(rules: Rules, schema: Mapping[str, object]) -> str:
    return rules.rule(rules.json(schema, {}))


def _harmony(rules: Rules, wanted: Wanted) -> str:
    ways = []
    if wanted.functions:
        ways.append(channel_call(rules, wanted.functions))
    if wanted.schema is not None:
        ways.append(channel_answer(rules, _json(rules, wanted.schema)))
    elif wanted.text:
        ways.append(channel_answer(rules, rules.without(["<|end|>", "<|return|>", "<|call|>"])))
    return f"{channel_start(rules)} ({' | '.join(ways)})"
