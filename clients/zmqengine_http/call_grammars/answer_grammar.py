"""The grammar of a whole output: calls alone, text followed by calls, JSON, or the model's choice of these.

The harmony channels of gpt-oss are reasoning, then a message to a function or the final answer; the prompt
ends with `<|start|>assistant`. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.text.tool_calls import CallFormat, Markers
from zmqengine_http.call_grammars.frames import OfferedCalls, frame
from zmqengine_http.call_grammars.lark import GrammarRules, OfferedFunction, alternation
from zmqengine_http.serving.errors import bad_field


class AnswerForms(NamedTuple):
    """The forms that an output may have: calls of `functions`, `text` followed by calls, or JSON of `schema`.

    Without `text` and `schema` the output is a call, with `several` one call or more. `reasoned`: the
    template has opened the reasoning, and the grammar begins after it.
    """

    functions: Sequence[OfferedFunction] = ()
    several: bool = True
    text: bool = False
    schema: Mapping[str, object] | None = None
    reasoned: bool = False


def answer_grammar(rules: GrammarRules, markers: Markers, template: str, wanted: AnswerForms) -> str:
    """The grammar of an output. Raises a 400 if the model's call format has none."""
    if markers.harmony:
        return rules.grammar(_harmony(rules, wanted))
    line = f"{rules.expression(chr(92) + 'n{1,2}')}? " if wanted.reasoned else ""
    if not wanted.functions:
        assert wanted.schema is not None
        return rules.grammar(line + _json(rules, wanted.schema))
    calls = markers.calls
    inside = frame(rules, OfferedCalls(calls, wanted.functions, wanted.several, template)) if calls else None
    if calls is None or inside is None:
        raise no_call_grammar(calls.name if calls else "")
    inside = rules.rule(inside)
    start = rules.marker(calls.start)
    if wanted.schema is not None:
        return rules.grammar(f"{line}({_json(rules, wanted.schema)} | {start} {inside})")
    if not wanted.text:
        return rules.grammar(f"{line}{inside if calls.bare else f'{start} {inside}'}")
    return rules.grammar(_optional_reasoning(rules, markers, wanted) + _text_then_calls(rules, calls, inside))


def no_call_grammar(name: str) -> Exception:
    """A 400 for a call format without a grammar."""
    format_ = f"the format {name!r}" if name else "a format that this server does not know"
    return bad_field(
        "tool_choice",
        f"this model writes its calls in {format_}, which cannot be constrained",
        code="unsupported_value",
    )


def _text_then_calls(rules: GrammarRules, calls: CallFormat, inside: str) -> str:
    start = calls.start
    free = rules.without([start])
    if calls.bare:
        # Text that begins like an object would be parsed as a call.
        text = rules.without([start], r"[^\s{](?s:.)*")
        return f"({text} | {inside} | {text}? {rules.marker(start)} {inside})?"
    if rules.token(start) is not None:
        return f"{free}? ({rules.marker(start)} {inside})?"
    return f"({free} | {rules.up_to(start)} {inside})?"


def _optional_reasoning(rules: GrammarRules, markers: Markers, wanted: AnswerForms) -> str:
    """Optional reasoning, between markers that the model itself generates."""
    if not markers.think_start or wanted.reasoned:
        return ""
    if rules.token(markers.think_start) is None or rules.token(markers.think_end) is None:
        return ""
    return f"({rules.marker(markers.think_start)} {rules.up_to(markers.think_end)})? "


def _json(rules: GrammarRules, schema: Mapping[str, object]) -> str:
    return rules.rule(rules.json(schema, {}))


def _harmony(rules: GrammarRules, wanted: AnswerForms) -> str:
    ways = []
    if wanted.functions:
        ways.append(channel_call(rules, wanted.functions))
    if wanted.schema is not None:
        ways.append(channel_answer(rules, _json(rules, wanted.schema)))
    elif wanted.text:
        ways.append(channel_answer(rules, rules.without(["<|end|>", "<|return|>", "<|call|>"])))
    return f"{channel_start(rules)} ({' | '.join(ways)})"


def channel_call(rules: GrammarRules, functions: Sequence[OfferedFunction]) -> str:
    """A harmony message to one of the functions."""
    constrain, message = rules.marker("<|constrain|>"), rules.marker("<|message|>")
    end = "" if rules.is_end("<|call|>") else f" {rules.marker('<|call|>')}"
    calls = alternation(
        f"{rules.text(f'commentary to=functions.{function.name} ')} {constrain} {rules.text('json')} {message} "
        f"{rules.arguments(function)}{end}"
        for function in functions
    )
    return rules.rule(f"{rules.marker('<|channel|>')} {calls}")


def channel_answer(rules: GrammarRules, content: str) -> str:
    """A harmony message on the final channel."""
    end = "" if rules.is_end("<|return|>") else f" {rules.marker('<|return|>')}"
    return rules.rule(
        f"{rules.marker('<|channel|>')} {rules.text('final')} {rules.marker('<|message|>')} {content}{end}"
    )


def channel_start(rules: GrammarRules) -> str:
    """Any number of harmony messages before a call or the final answer: reasoning, and commentary to the
    user."""
    text = rules.without(["<|end|>", "<|start|>", "<|channel|>", "<|message|>"])
    kinds = alternation(map(rules.text, ("analysis", "commentary")))
    one = rules.rule(
        f"{rules.marker('<|channel|>')} {kinds} {rules.marker('<|message|>')} {text} {rules.marker('<|end|>')} "
        f"{rules.marker('<|start|>')} {rules.text('assistant')}"
    )
    return f"{one}*"
