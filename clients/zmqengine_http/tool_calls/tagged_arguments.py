"""An incremental parser of arguments written as bare text between tags: text in, JSON out, piece by piece.

Strings, by their schema, are streamed as they are generated, and so are objects and lists, whose strings may
contain the tags; any other value is emitted when its tag closes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from zmqengine_http.tool_calls.deltas import TextUpTo, overlap
from zmqengine_http.tool_calls.json_arguments import JsonArguments, escaped
from zmqengine_http.tool_calls.schema_types import argument_types, convert_text, without_padding

TAG_CHARS_MAX = 1000


class Tags(NamedTuple):
    """The tags around values.

    `opening` matches the tags before a value; its first group is the key, its group `declared`, if any, the type
    that the tag states. `within` matches a prefix of an opening tag. A value is followed by one of
    `closings`, the last value by one of `ends`. `padded`: line breaks at both ends of a value always belong
    to its tags.
    """

    opening: re.Pattern[str]
    within: re.Pattern[str]
    closings: tuple[str, ...]
    ends: tuple[str, ...] = ()
    padded: bool = False


class TaggedArguments:
    """An `ArgumentsParser` of tagged values, from the text after the function's name.

    The arguments end with one of the tags' `ends`, which is consumed, or before `call_end`, which stays in
    `rest`. Unknown tags are skipped.
    """

    def __init__(self, parameters: Mapping[str, object], tags: Tags, call_end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._parameters = parameters
        self._tags = tags
        self._call_end = call_end
        self._in_value = False
        self._kinds: frozenset[str] = frozenset()
        self._in_text = False
        self._padded = tags.padded
        self._nested: JsonArguments | None = None
        self._whole: TextUpTo | None = None
        self._at_start = False
        self._count = -1

    def feed(self, text: str) -> str:
        """Parse more text; returns the JSON it adds."""
        self.rest += text
        pieces = []
        if self._count < 0:
            self._count = 0
            pieces.append("{")
        while not (self.done or self.broken):
            piece = self._value() if self._in_value else self._between()
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def _between(self) -> str | None:
        place = self.rest.find("<")
        if place < 0:
            self.rest = ""
            return None
        self.rest = self.rest[place:]
        opened = self._tags.opening.match(self.rest)
        if opened:
            self.rest = self.rest[opened.end() :]
            key = opened[1].strip()
            self._kinds = argument_types(self._parameters, key, opened.groupdict().get("declared"))
            self._in_value = self._at_start = True
            comma = "," if self._count else ""
            self._count += 1
            return f'{comma}"{escaped(key)}":'
        for end in self._tags.ends:
            if self.rest.startswith(end):
                self.rest = self.rest[len(end) :]
                return self._end()
        if self._call_end and self.rest.startswith(self._call_end):
            return self._end()
        if self._may_open():
            return None
        self.rest = self.rest[1:]
        return ""

    def _end(self) -> str:
        self.done = True
        return "}"

    def _may_open(self) -> bool:
        """Whether the held text is a prefix of one of the tags."""
        if any(end.startswith(self.rest) for end in (*self._tags.ends, self._call_end)):
            return True
        return len(self.rest) < TAG_CHARS_MAX and self._tags.within.fullmatch(self.rest) is not None

    def _value(self) -> str | None:
        if self._whole is None and (self._nested is not None or self._begins_nested()):
            return self._nested_piece()
        if self._whole is not None or not (self._in_text or self._begins_text()):
            return self._whole_value()
        place = self._closing_place()
        piece = ""
        if self._at_start:
            if not self.rest:
                return None
            self._at_start, self._in_text = False, True
            self._padded = self._tags.padded or self.rest.startswith("\n")
            self.rest = self.rest.removeprefix("\n")
            piece = '"'
            place = self._closing_place()
        if place is not None:
            at, closing = place
            text, self.rest = self.rest[:at], self.rest[at + len(closing) :]
            self._in_value = self._in_text = False
            return piece + escaped(text.removesuffix("\n") if self._padded else text) + '"'
        keep = max(overlap(self.rest, closing) for closing in self._tags.closings)
        sure = len(self.rest) - keep
        # A line break before the closing tag may belong to the tag.
        sure -= self._padded and self.rest[:sure].endswith("\n")
        text, self.rest = self.rest[:sure], self.rest[sure:]
        return piece + escaped(text) if piece or text else None

    def _begins_nested(self) -> bool:
        """Whether the value is an object or a list."""
        beside_text = not self._kinds or "string" in self._kinds
        if self._in_text or beside_text or not self.rest[:TAG_CHARS_MAX].lstrip().startswith(("{", "[")):
            return False
        self._nested = JsonArguments(arrays=True)
        return True

    def _nested_piece(self) -> str | None:
        nested = self._nested
        assert nested is not None
        if not nested.done:
            text, self.rest = nested.feed(self.rest), ""
            if nested.done or nested.broken:
                self.rest, nested.rest = nested.rest, ""
            self.broken = nested.broken
            return text or ("" if nested.done else None)
        place = self._closing_place()
        if place is None:
            return None
        self.rest = self.rest[place[0] + len(place[1]) :]
        self._in_value, self._nested = False, None
        return ""

    def _begins_text(self) -> bool:
        """Whether the value is certainly a string, so that it can be streamed."""
        if "string" not in self._kinds:
            return False
        if "null" not in self._kinds:
            return True
        start = self.rest.removeprefix("\n")
        nothing = [f"null{line}{closing}" for line in ("", "\n") for closing in self._tags.closings]
        return not any(text.startswith(start) or start.startswith(text) for text in nothing)

    def _whole_value(self) -> str | None:
        if self._whole is None:
            if self._may_be_nested_or_text():
                return None
            self._whole = TextUpTo(self._tags.closings)
        found = self._whole.feed(self.rest)
        self.rest = ""
        if found is None:
            return None
        text, self._whole, self.rest = self._whole.text, None, found[1]
        self._in_value = False
        value = convert_text(without_padding(text, always=self._tags.padded), self._kinds)
        return msgspec.json.encode(value).decode()

    def _may_be_nested_or_text(self) -> bool:
        """Whether more of a value, which is short so far, can show that it is streamed."""
        return len(self.rest) < TAG_CHARS_MAX and self._closing_place() is None

    def _closing_place(self) -> tuple[int, str] | None:
        found = [(self.rest.find(closing), closing) for closing in self._tags.closings]
        return min(((place, closing) for place, closing in found if place >= 0), default=None)
