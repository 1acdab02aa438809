"""Parses calls of MiniMax M3: values as nested tags, each tag after a mark that never occurs in text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zmqengine_client.text.tool_calls.call_format import ParsedCall, Schemas, nonempty
from zmqengine_client.text.tool_calls.lenient_json import DEPTH_MAX, Malformed
from zmqengine_client.text.tool_calls.schema_types import Schema, alternatives, convert_text, types_of

MARK = "]<]minimax[>["
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>]+)>")
_INVOKE = re.compile(r"""invoke name=["']?([^"'\s]+)["']?""")


class _Tag(NamedTuple):
    closes: bool
    name: str
    text: str


def parse_nested(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `<invoke name="name"><key>value</key>...</invoke>`: objects contain tags of keys, lists tags
    `item`."""
    places = list(_TAG.finditer(text))
    ends = [*(place.start() for place in places[1:]), len(text)]
    tags = iter(
        [_Tag(bool(tag[1]), tag[2], text[tag.end() : end]) for tag, end in zip(places, ends, strict=False)]
    )
    calls = []
    for tag in tags:
        found = _INVOKE.fullmatch(tag.name)
        if tag.closes or not found:
            raise Malformed("no call")
        schema = schemas.get(found[1], {})
        members = _members(tags, _INVOKE, schema, schema, DEPTH_MAX)
        calls.append(ParsedCall(found[1], dict(members)))
    return nonempty(calls)


def _members(
    tags: Iterator[_Tag], closing: re.Pattern[str] | str, schema: object, root: Schema, depth: int
) -> list[tuple[str, object]]:
    """The keys and values up to the closing tag of their parent."""
    members: list[tuple[str, object]] = []
    for tag in tags:
        if tag.closes:
            if tag.name == closing or (tag.name == "invoke" and closing is _INVOKE):
                return members
            raise Malformed(f"no place for the end of {tag.name[:40]}")
        if not depth:
            raise Malformed("nested too deep")
        members.append((tag.name, _value(tags, tag, _part(schema, root, tag.name), root, depth - 1)))
    raise Malformed("a tag is not closed")


def _value(tags: Iterator[_Tag], tag: _Tag, schema: object, root: Schema, depth: int) -> object:
    inner = _members(tags, tag.name, schema, root, depth)
    kinds = types_of(schema, root)
    if not inner:
        if not tag.text and "string" not in kinds and kinds & {"array", "object"}:
            return [] if "array" in kinds else {}
        return convert_text(tag.text, kinds)
    if "array" in kinds or (not kinds and all(name == "item" for name, _ in inner)):
        return [value for _, value in inner]
    return dict(inner)


def _part(schema: object, root: Schema, name: str) -> object:
    """The schema of a member of an object or an item of a list, or None."""
    for choice in alternatives(schema, root):
        properties = choice.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if name == "item" and "items" in choice:
            return choice["items"]
    return None
