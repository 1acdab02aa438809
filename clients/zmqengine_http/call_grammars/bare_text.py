"""Arguments without quotes, up to a closing tag: what `tool_calls/typed.py` reads back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zmqengine_http.call_grammars.lark import ANY_TEXT, GrammarRules, OfferedFunction, alternation
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords
from zmqengine_http.call_grammars.written_values import object_members
from zmqengine_http.tool_calls.typed import Schema, alternatives, kinds_of, resolved, values_of

STRING_KEYWORDS = ("contentEncoding", "contentMediaType", "contentSchema", "format", "pattern")
OBJECT_KEYWORDS = (
    "anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties", "propertyNames", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties",
)  # fmt: skip
ANY_KEYWORDS = ("allOf", "not", "if", "$ref", "$dynamicRef")
_MISREAD = re.compile("^\n|\n$")


def members(rules: GrammarRules, function: OfferedFunction) -> Iterator[tuple[str, object, bool]]:
    """The arguments of a function in their order, with the schema of each, and whether it must be there."""
    parameters = resolved(function.parameters, function.parameters)
    for keyword in (*OBJECT_KEYWORDS, *ANY_KEYWORDS):
        if keyword in parameters:
            rules.pass_over(function, keyword)
    yield from (
        (name, schema if isinstance(schema, Mapping) else {}, needed)
        for name, schema, needed in object_members(parameters)
    )


def bare_value(rules: GrammarRules, function: OfferedFunction, schema: object, end: str) -> str:
    """A value and the tag behind it; `end` begins with the line break that belongs to the tag, if there is
    one."""
    root = function.parameters
    kinds = kinds_of(schema, root)
    if kinds and "string" not in kinds:
        return json_value(rules, function, schema, end)
    for keyword in sorted(unenforced_keywords(schema)):
        rules.pass_over(function, keyword)
    choices = [choice for part in alternatives(schema, root) for choice in _texts(rules, function, part, end)]
    if "null" in kinds:
        choices.append(f"{rules.text('null')} {_closing(rules, end)}")
    return alternation(dict.fromkeys(choices))


def json_value(rules: GrammarRules, function: OfferedFunction, schema: object, end: str) -> str:
    """A value as JSON, and the tag behind it."""
    root = function.parameters
    for keyword in sorted(unenforced_keywords(schema)):
        rules.pass_over(function, keyword)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    whole = {**definitions, **schema} if isinstance(schema, Mapping) else {}
    return f"{rules.value(whole, function)} {_closing(rules, end)}"


def _closing(rules: GrammarRules, end: str) -> str:
    tag = end.lstrip("\n")
    return f"{rules.text(end[: -len(tag)])} {rules.marker(tag)}" if tag != end else rules.marker(tag)


def _texts(rules: GrammarRules, function: OfferedFunction, part: Schema, end: str) -> Iterator[str]:
    """What a schema that allows strings, or anything, can be as bare text."""
    kind = part.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    if kinds and "string" not in kinds:
        return
    for keyword in (*STRING_KEYWORDS, *ANY_KEYWORDS):
        if keyword in part:
            rules.pass_over(function, keyword)
    values = values_of(part)
    if values is not None:
        for value in values:
            if isinstance(value, str) and not _MISREAD.search(value):
                yield f"{rules.text(value)} {_closing(rules, end)}"
        return
    tag = end.lstrip("\n")
    body = rules.without([tag], _of_length(part, bare=tag == end))
    if rules.token(tag) is None:
        # One terminal with its end, or the text would swallow the beginning of the tag.
        yield rules.terminal(f"{body} {rules.text(end)}")
    else:
        line = end[: -len(tag)]
        yield f"{rules.terminal(f'{body} {rules.text(line)}') if line else body} {rules.marker(tag)}"


def _of_length(part: Schema, *, bare: bool) -> str:
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    if not least and most == "":
        return ANY_TEXT
    if bare and isinstance(least, int) and least and (most == "" or isinstance(most, int)):
        # A line break at either end is taken for the tag's: it must not count.
        inner = f"{{{max(least - 2, 0)},{max(most - 2, 0) if isinstance(most, int) else ''}}}"
        long = f"[^\\n](?s:.){inner}[^\\n]"
        return f"(?:[^\\n]|{long})" if least == 1 else long
    return f"(?s:.){{{least},{most}}}"
