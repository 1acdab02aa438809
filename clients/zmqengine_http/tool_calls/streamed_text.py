"""Arguments that are written as bare text between tags, while they come: JSON out, piece by piece.

A text that its schema calls a string is told as it is written, and so are objects and lists, which may have the tags
in their texts; any other value when its tag is closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from zmqengine_http.tool_calls.deltas import overlap
from zmqengine_http.tool_calls.streamed import ArgumentsReader, escaped
from zmqengine_http.tool_calls.typed import kinds_of, property_of, typed

TAG_CHARS_MAX = 1000


class TaggedArguments:
    """`feed` it what follows the name of a function; it gives JSON until the arguments end.

    `opening` matches the tags before a value, with its key as the group; one of `closings` stands behind it. The
    arguments end with one of `ends`, which is taken, or before `call_end`, which is left in `rest`; then `done` is
    true. Other tags are passed over.
    """

    def __init__(
        self,
        parameters: Mapping[str, object],
        opening: re.Pattern[str],
        closings: tuple[str, ...],
        ends: tuple[str, ...],
        call_end: str,
    ) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._parameters = parameters
        self._opening = opening
        self._closings = closings
        self._ends = ends
        self._call_end = call_end
        self._key: str | None = None
        self._in_text = False
        self._nested: ArgumentsReader | None = None
        self._at_start = False
        self._count = -1

    def feed(self, text: str) -> str:
        """The JSON that this text adds."""
        self.rest += text
        pieces = []
        if self._count < 0:
            self._count = 0
            pieces.append("{")
        while not (self.done or self.broken):
            piece = self._between() if self._key is None else self._in_value(self._key)
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
        opened = self._opening.match(self.rest)
        if opened:
            self.rest = self.rest[opened.end() :]
            self._key, self._at_start = opened[1].strip(), True
            comma = "," if self._count else ""
            self._count += 1
            return f'{comma}"{escaped(self._key)}":'
        for end in self._ends:
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
        """Whether what is held may still become one of the tags."""
        if any(end.startswith(self.rest) for end in (*self._ends, self._call_end)):
            return True
        closed = self.rest.find(">")
        if closed < 0:
            return len(self.rest) < TAG_CHARS_MAX
        # A key between tags of its own: what follows it may not have come.
        return (
            self.rest.startswith("<arg_key>")
            and "<arg_value>" not in self.rest[:TAG_CHARS_MAX]
            and (len(self.rest) < TAG_CHARS_MAX)
        )

    def _in_value(self, key: str) -> str | None:
        if self._nested is not None or self._begins_nested(key):
            return self._in_nested()
        if not self._in_text and not self._begins_text(key):
            return self._whole_value(key)
        place = self._closing_place()
        piece = ""
        if self._at_start:
            if not self.rest:
                return None
            self._at_start, self._in_text = False, True
            self.rest = self.rest.removeprefix("\n")
            piece = '"'
            place = self._closing_place()
        if place is not None:
            at, closing = place
            text, self.rest = self.rest[:at].removesuffix("\n"), self.rest[at + len(closing) :]
            self._key, self._in_text = None, False
            return piece + escaped(text) + '"'
        keep = max(overlap(self.rest, closing) for closing in self._closings)
        sure = len(self.rest) - keep
        # A line break before the closing tag belongs to the tag.
        sure -= self.rest[:sure].endswith("\n")
        text, self.rest = self.rest[:sure], self.rest[sure:]
        return piece + escaped(text) if piece or text else None

    def _begins_nested(self, key: str) -> bool:
        """Whether the value is an object or a list."""
        kinds = kinds_of(property_of(self._parameters, key), self._parameters)
        if self._in_text or not kinds or "string" in kinds or not self.rest.lstrip().startswith(("{", "[")):
            return False
        self._nested = ArgumentsReader(arrays=True)
        return True

    def _in_nested(self) -> str | None:
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
        self._key, self._nested = None, None
        return ""

    def _begins_text(self, key: str) -> bool:
        """Whether the value is a text for sure, so that it can be told before its end."""
        kinds = kinds_of(property_of(self._parameters, key), self._parameters)
        if "string" not in kinds:
            return False
        if "null" not in kinds:
            return True
        start = self.rest.removeprefix("\n")
        nothing = [f"null{line}{closing}" for line in ("", "\n") for closing in self._closings]
        return not any(text.startswith(start) or start.startswith(text) for text in nothing)

    def _whole_value(self, key: str) -> str | None:
        place = self._closing_place()
        if place is None:
            return None
        at, closing = place
        text, self.rest = self.rest[:at], self.rest[at + len(closing) :]
        self._key = None
        return msgspec.json.encode(typed(text, self._parameters, key)).decode()

    def _closing_place(self) -> tuple[int, str] | None:
        found = [(self.rest.find(closing), closing) for closing in self._closings]
        return min(((place, closing) for place, closing in found if place >= 0), default=None)
