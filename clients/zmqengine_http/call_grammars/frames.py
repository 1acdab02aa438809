"""Grammars of calls, from the layouts of their formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.text.tool_calls.call_format import CallFormat
from zmqengine_client.text.tool_calls.call_layout import PLACE, CallLayout, LiteralStyle, chosen
from zmqengine_client.text.tool_calls.markers import FORMATS
from zmqengine_client.text.tool_calls.schema_types import resolved, types_of
from zmqengine_http.call_grammars.lark import GrammarRules, OfferedFunction, alternation
from zmqengine_http.call_grammars.literal_values import LiteralValues, object_members
from zmqengine_http.call_grammars.tagged_values import members, tagged_json, tagged_text
from zmqengine_http.serving.errors import bad_field

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
WITHOUT_GRAMMAR = frozenset(name for name, format_ in FORMATS.items() if not format_.constrained)
"""Formats that are parsed but have no grammar: their calls are not constrained, and forcing one is a 400."""


class OfferedCalls(NamedTuple):
    """The functions that may be called, and the format; `several`: one call or more. `template`: the chat
    template."""

    format: CallFormat
    functions: Sequence[OfferedFunction]
    several: bool
    template: str


def frame(rules: GrammarRules, calls: OfferedCalls) -> str | None:
    """The calls, after the marker that starts them; None for a format without a grammar. Raises a 400."""
    if not calls.format.constrained:
        return None
    layouts = chosen(
        calls.format.layouts, lambda text: text in calls.template or rules.token(text) is not None
    )
    frames = [_Frame(rules, calls.format, layout).calls(calls) for layout in layouts]
    return frames[0] if len(frames) == 1 else alternation(frames)


class _Frame:
    """Writes the rules of one layout."""

    def __init__(self, rules: GrammarRules, format_: CallFormat, layout: CallLayout) -> None:
        self._rules = rules
        self._layout = layout
        markers = sorted(
            {*layout.markers, *filter(None, [format_.start, format_.end])}, key=len, reverse=True
        )
        self._markers = frozenset(markers)
        self._pieces = re.compile(
            f"({'|'.join([PLACE.pattern.replace('(', '(?:'), *map(re.escape, markers)])})"
        )

    def calls(self, calls: OfferedCalls) -> str:
        """The calls in their order, with what stands around them."""
        layout = self._layout
        one = self._rules.rule(alternation(self._call(function) for function in calls.functions))
        if calls.several and layout.several:
            one = f"{one} ({self._text(layout.between)} {one})*"
        return " ".join(filter(None, (self._text(layout.before), one, self._text(layout.after))))

    def _call(self, function: OfferedFunction) -> str:
        return self._text(
            self._layout.call,
            name=lambda: self._rules.text(function.name),
            arguments=lambda: self._arguments(function),
        )

    def _text(self, text: str, **places: Callable[[], str]) -> str:
        """The expressions of a text of the layout, its markers and its places."""
        rules = self._rules
        known: Mapping[str, Callable[[], str]] = {
            "number": lambda: rules.expression("[0-9]{1,3}"),
            "space": lambda: rules.rule(rules.expression("\\n? {0,4}")),
            "line": lambda: rules.rule(f"{rules.text(chr(10))}?"),
            **places,
        }
        parts = []
        for part in filter(None, self._pieces.split(text)):
            place = PLACE.fullmatch(part)
            if place:
                parts.append(known[place[1]]())
            else:
                parts.append(rules.marker(part) if part in self._markers else rules.text(part))
        return " ".join(parts)

    def _arguments(self, function: OfferedFunction) -> str:
        layout = self._layout
        if layout.style is not None:
            return self._literals(function, layout.style)
        if not layout.argument:
            return self._rules.arguments(function)
        parts = []
        for name, schema, needed in members(self._rules, function):
            argument = self._rules.rule(self._argument(function, _tag_name(function, name), schema))
            parts.append(argument if needed else f"{argument}?")
        return " ".join(parts) or self._rules.text("")

    def _argument(self, function: OfferedFunction, name: str, schema: object) -> str:
        layout, rules = self._layout, self._rules
        # A value that may be a string or another type is written as JSON, where its tag states which.
        text = not layout.typed or types_of(schema, function.parameters) == {"string"}
        value = (tagged_text if text else tagged_json)(rules, function, schema, layout.closing)
        kind = "true" if text else "false"
        head = self._text(layout.argument, key=lambda: rules.text(name), string=lambda: rules.text(kind))
        return " ".join(filter(None, (head, value, self._text(layout.behind))))

    def _literals(self, function: OfferedFunction, style: LiteralStyle) -> str:
        rules = self._rules
        values = LiteralValues(rules, function, style)
        named = object_members(resolved(function.parameters, function.parameters))
        if not style.keywords:
            return values.arguments(named, values.key)
        for name, _, needed in named:
            if needed and not _IDENTIFIER.fullmatch(name):
                raise bad_field(
                    "tools", f"{function.name}: {name[:100]!r} cannot be the name of an argument in Python"
                )
        named = [each for each in named if _IDENTIFIER.fullmatch(each[0])]
        return values.arguments(named, lambda name: rules.text(f"{name}="))


def _tag_name(function: OfferedFunction, name: str) -> str:
    if re.search(r"""["'<>\s]""", name) or not name:
        raise bad_field(
            "tools", f"{function.name}: {name[:100]!r} cannot stand in a tag, where this model writes it"
        )
    return name
