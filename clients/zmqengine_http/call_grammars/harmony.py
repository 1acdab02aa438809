"""The channels of gpt-oss: reasoning, then a message to a function, or the answer.

The prompt ends with `<|start|>assistant`. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_http.call_grammars.lark import Function, Rules, one_of


def channel_call(rules: Rules, functions: Sequence[Function]) -> str:
    """A message to one of the functions."""
    constrain, message = rules.marker("<|constrain|>"), rules.marker("<|message|>")
    end = "" if rules.is_end("<|call|>") else f" {rules.marker('<|call|>')}"
    calls = one_of(
        f"{rules.text(f'commentary to=functions.{function.name} ')} {constrain} {rules.text('json')} {message} "
        f"{rules.arguments(function)}{end}"
        for function in functions
    )
    return rules.rule(f"{rules.marker('<|channel|>')} {calls}")


def channel_answer(rules: Rules, content: str) -> str:
    """The answer itself."""
    end = "" if rules.is_end("<|return|>") else f" {rules.marker('<|return|>')}"
    return rules.rule(
        f"{rules.marker('<|channel|>')} {rules.text('final')} {rules.marker('<|message|>')} {content}{end}"
    )


def channel_start(rules: Rules) -> str:
    """What may come before either: messages of reasoning, and what the user is told meanwhile."""
    text = rules.without(["<|end|>", "<|start|>", "<|channel|>", "<|message|>"])
    kinds = one_of(map(rules.text, ("analysis", "commentary")))
    one = rules.rule(
        f"{rules.marker('<|channel|>')} {kinds} {rules.marker('<|message|>')} {text} {rules.marker('<|end|>')} "
        f"{rules.marker('<|start|>')} {rules.text('assistant')}"
    )
    return f"{one}*"
