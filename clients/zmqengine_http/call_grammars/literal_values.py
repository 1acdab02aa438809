"""Grammars of arguments as Python or Gemma literals, from their JSON schema."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from zmqengine_client.text.tool_calls.call_layout import LiteralStyle
from zmqengine_client.text.tool_calls.schema_types import Schema, resolved, types_of, values_of
from zmqengine_http.call_grammars.lark import GrammarRules, OfferedFunction, alternation
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords

ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("minLength", "maxLength", "pattern", "format")
_UNSUPPORTED = {
    "array": ("prefixItems", "unevaluatedItems"),
    "object": ("patternProperties", "minProperties", "maxProperties"),
}
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_ANNOTATIONS = frozenset(
    ("$comment", "$ref", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
)
DEPTH_MAX = 32
ANY_DEPTH = 2


class LiteralValues:
    """Builds the rules of one function's arguments."""

    def __init__(self, rules: GrammarRules, function: OfferedFunction, style: LiteralStyle) -> None:
        self._rules = rules
        self._function = function
        self._style = style
        self._root = function.parameters
        self._references: dict[str | int, str] = {}
        self._waiting: deque[tuple[str, int, Schema]] = deque()
        for keyword in sorted(unenforced_keywords(function.parameters)):
            rules.skip_keyword(function, keyword)

    def arguments(self, items: Iterable[tuple[str, object, bool]], key: Callable[[str], str]) -> str:
        """The arguments in this order, each a name, a schema, and whether it is required."""
        written = self._members(items, key, DEPTH_MAX)
        # In a loop: each reference within another would be a level of recursion.
        while self._waiting:
            name, place, schema = self._waiting.popleft()
            self._rules.set_rule(name, place, self._body(schema, DEPTH_MAX))
        return written

    def _members(
        self, items: Iterable[tuple[str, object, bool]], key: Callable[[str], str], depth: int
    ) -> str:
        """Comma-separated members in this order."""
        first, later = self._rules.text(""), self._rules.text("")
        comma = self._rules.text(self._style.comma)
        for name, schema, needed in reversed(list(items)):
            member = f"{key(name)} {self._value(schema, depth)}"
            after = self._rules.rule(later)
            begin, go_on = f"{member} {after}", f"{comma} {member} {after}"
            first = begin if needed else alternation((begin, self._rules.rule(first)))
            later = go_on if needed else alternation((go_on, after))
        return self._rules.rule(first)

    def key(self, name: str) -> str:
        """A key of an object, and its colon."""
        bare = self._style.bare_keys and _WORD.fullmatch(name)
        written = self._rules.text(name) if bare else self._literal(name)
        return f"{written} {self._rules.text(self._style.colon)}"

    def _value(self, schema: object, depth: int) -> str:
        if not isinstance(schema, Mapping) or not schema:
            # An undescribed value needs few levels, and every level doubles the grammar.
            schema, depth = {}, min(depth, ANY_DEPTH)
        if depth < 1:
            return alternation(self._kind(kind, {}, 0) for kind in ALL_TYPES[:4])
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference, schema)
        return self._body(resolved(schema, self._root), depth)

    def _reference(self, reference: str, schema: Schema) -> str:
        """The rule of a reference; of its place alone if other keywords than annotations stand beside it."""
        key = reference if schema.keys() <= _ANNOTATIONS else id(schema)
        if key not in self._references:
            target = resolved(schema, self._root)
            if "$ref" in target:
                self._rules.skip_keyword(self._function, "$ref")
                return self._value({}, ANY_DEPTH)
            name, place = self._rules.later_rule()
            self._references[key] = name
            self._waiting.append((name, place, target))
        return self._references[key]

    def _body(self, schema: Schema, depth: int) -> str:
        for keyword in ("allOf", "$ref"):
            if keyword in schema:
                self._rules.skip_keyword(self._function, keyword)
        for keyword in ("anyOf", "oneOf"):
            choices = schema.get(keyword)
            if isinstance(choices, list) and choices:
                if _constrains(schema):
                    self._rules.skip_keyword(self._function, keyword)
                return alternation(dict.fromkeys(self._value(choice, depth - 1) for choice in choices))
        values = values_of(schema)
        if values is not None:
            return alternation(dict.fromkeys(self._literal(value) for value in values))
        kinds = types_of(schema, self._root) or ALL_TYPES
        return alternation(
            self._kind(kind, schema, depth) for kind in ALL_TYPES if kind in _without_integer(kinds)
        )

    def _kind(self, kind: str, schema: Schema, depth: int) -> str:
        for keyword in _UNSUPPORTED.get(kind, ()):
            if keyword in schema:
                self._rules.skip_keyword(self._function, keyword)
        if kind == "string":
            return self._string(schema)
        if kind == "number":
            kinds = types_of(schema, self._root)
            exact = "integer" if kinds and "number" not in kinds else "number"
            return self._rules.value({"type": exact, **_subset(schema, _NUMBERS)}, self._function)
        if kind == "boolean":
            return alternation(self._rules.text(self._style.words[value]) for value in (True, False))
        if kind == "null":
            return self._rules.text(self._style.words[None])
        return self._array(schema, depth) if kind == "array" else self._object(schema, depth)

    def _string(self, schema: Schema) -> str:
        if not self._style.quote:
            return self._rules.value({"type": "string", **_subset(schema, _STRINGS)}, self._function)
        for keyword in ("pattern", "format"):
            if keyword in schema:
                self._rules.skip_keyword(self._function, keyword)
        length = f"(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        body = self._rules.without([self._style.quote], length)
        mark = self._rules.marker(self._style.quote)
        if self._rules.token(self._style.quote) is not None:
            return f"{mark} {body} {mark}"
        return f"{mark} {self._rules.terminal(f'{body} {mark}')}"

    def _array(self, schema: Schema, depth: int) -> str:
        item = self._rules.rule(self._value(schema.get("items", {}), depth - 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        least = least if isinstance(least, int) else 0
        if isinstance(most, int) and most < max(least, 1):
            return self._rules.text("[]")
        more = f"{{{max(least - 1, 0)},{most - 1 if isinstance(most, int) else ''}}}"
        items = f"{item} ({self._rules.text(self._style.comma)} {item}){more}"
        inside = f"({items})" if least else f"({items})?"
        return f'"[" {inside} "]"'

    def _object(self, schema: Schema, depth: int) -> str:
        named = object_members(schema)
        more = schema.get("additionalProperties", True)
        if named or more is False:
            return f'"{{" {self._members(named, self.key, depth - 1)} "}}"'
        key = self._string({"minLength": 1}) if not self._style.bare_keys else self._rules.expression(_KEY)
        value = self._rules.rule(self._value(more, depth - 1))
        member = f"{key} {self._rules.text(self._style.colon)} {value}"
        return f'"{{" ({member} ({self._rules.text(self._style.comma)} {member})*)? "}}"'

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            if not self._style.quote:
                return self._rules.text(json.dumps(value, ensure_ascii=False))
            mark = self._rules.marker(self._style.quote)
            return f"{mark} {self._rules.text(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, Mapping):
            return self._joined(
                "{", [f"{self.key(str(name))} {self._literal(each)}" for name, each in value.items()], "}"
            )
        if isinstance(value, Sequence):
            return self._joined("[", [self._literal(each) for each in value], "]")
        if value is None or isinstance(value, bool):
            return self._rules.text(self._style.words[value])
        return self._rules.text(json.dumps(value))

    def _joined(self, opening: str, parts: Sequence[str], closing: str) -> str:
        comma = f" {self._rules.text(self._style.comma)} "
        return f"{self._rules.text(opening)} {comma.join(parts)} {self._rules.text(closing)}"


def object_members(schema: Schema) -> list[tuple[str, object, bool]]:
    """The members of an object that its schema names or requires: name, schema, and whether it is
    required."""
    properties, required = schema.get("properties"), schema.get("required")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    demanded = dict.fromkeys(str(name) for name in required) if isinstance(required, list) else {}
    more = schema.get("additionalProperties", True)
    if more is not False:
        named |= {name: more for name in demanded if name not in named}
    return [(name, part, name in demanded) for name, part in named.items() if part is not False]


def _constrains(schema: Schema) -> bool:
    """Whether a schema has keywords beside a choice of schemas."""
    rules = (
        *_NUMBERS,
        *_STRINGS,
        "type",
        "enum",
        "const",
        "properties",
        "items",
        "required",
        "additionalProperties",
    )
    return any(name in schema for name in rules)


def _without_integer(kinds: Iterable[str]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in kinds}


def _subset(schema: Schema, names: Sequence[str]) -> dict[str, object]:
    return {name: schema[name] for name in names if name in schema}
