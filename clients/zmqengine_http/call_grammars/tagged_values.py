"""Grammars of arguments as bare text up to a closing tag, which `tool_calls/schema_types.py` converts
back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zmqengine_client.text.tool_calls.schema_types import Schema, alternatives, resolved, types_of, values_of
from zmqengine_http.call_grammars.lark import ANY_TEXT, GrammarRules, OfferedFunction, alternation
from zmqengine_http.call_grammars.literal_values import object_members
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords

STRING_KEYWORDS = ("contentEncoding", "contentMediaType", "contentSchema", "format", "pattern")
OBJECT_KEYWORDS = (
    "anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties", "propertyNames", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties",
)  # fmt: skip
ANY_KEYWORDS = ("allOf", "not", "if", "$ref", "$dynamicRef")
_MISREAD = re.compile("^\n|\n$")


def members(rules: GrammarRules, function: OfferedFunction) -> Iterator[tuple[str, object, bool]]:
    """The arguments of a function in order: name, schema, and whether it is required."""
    parameters = resolved(function.parameters, function.parameters)
    for keyword in (*OBJECT_KEYWORDS, *ANY_KEYWORDS):
        if keyword in parameters:
            rules.skip_keyword(function, keyword)
    yield from (
        (name, schema if isinstance(schema, Mapping) else {}, needed)
        for name, schema, needed in object_members(parameters)
    )


def tagged_text(rules: GrammarRules, function: OfferedFunction, schema: object, end: str) -> str:
    """A value followed by its closing tag; `end` is the tag, with a leading line break if that belongs to
    it."""
    root = function.parameters
    kinds = types_of(schema, root)
    if kinds and "string" not in kinds:
        return tagged_json(rules, function, schema, end)
    for keyword in sorted(unenforced_keywords(schema)):
        rules.skip_keyword(function, keyword)
    choices = [choice for part in alternatives(schema, root) for choice in _texts(rules, function, part, end)]
    if "null" in kinds:
        choices.append(f"{rules.text('null')} {_closing(rules, end)}")
    return alternation(dict.fromkeys(choices))


def tagged_json(rules: GrammarRules, function: OfferedFunction, schema: object, end: str) -> str:
    """A value as JSON, followed by its closing tag."""
    root = function.parameters
    for keyword in sorted(unenforced_keywords(schema)):
        rules.skip_keyword(function, keyword)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    whole = {**definitions, **schema} if isinstance(schema, Mapping) else {}
    return f"{rules.value(whole, function)} {_closing(rules, end)}"


def _closing(rules: GrammarRules, end: str) -> str:
    tag = end.lstrip("\n")
    return f"{rules.text(end[: -len(tag)])} {rules.marker(tag)}" if tag != end else rules.marker(tag)


def _texts(rules: GrammarRules, function: OfferedFunction, part: Schema, end: str) -> Iterator[str]:
    """The bare texts allowed by a schema of strings or of any type."""
    kind = part.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    if kinds and "string" not in kinds:
        return
    for keyword in (*STRING_KEYWORDS, *ANY_KEYWORDS):
        if keyword in part:
            rules.skip_keyword(function, keyword)
    values = values_of(part)
    if values is not None:
        for value in values:
            if isinstance(value, str) and not _MISREAD.search(value):
                yield f"{rules.text(value)} {_closing(rules, end)}"
        return
    tag = end.lstrip("\n")
    body = rules.without([tag], _length_pattern(part, bare=tag == end))
    if rules.token(tag) is None:
        # Text and tag are one terminal, or the lexer would match the beginning of the tag as text.
        yield rules.terminal(f"{body} {rules.text(end)}")
    else:
        line = end[: -len(tag)]
        yield f"{rules.terminal(f'{body} {rules.text(line)}') if line else body} {rules.marker(tag)}"


def _length_pattern(part: Schema, *, bare: bool) -> str:
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    if not least and most == "":
        return ANY_TEXT
    if bare and isinstance(least, int) and least and (most == "" or isinstance(most, int)):
        # The parser attributes a line break at either end to the tag, so it must not count.
        inner = f"{{{max(least - 2, 0)},{max(most - 2, 0) if isinstance(most, int) else ''}}}"
        long = f"[^\\n](?s:.){inner}[^\\n]"
        return f"(?:[^\\n]|{long})" if least == 1 else long
    return f"(?s:.){{{least},{most}}}"
