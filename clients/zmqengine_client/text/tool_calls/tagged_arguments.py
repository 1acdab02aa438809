"""An incremental parser of arguments written as bare text between tags: text in, JSON out, piece by piece.

Strings, by their schema, are streamed as they are generated, and so are objects and lists, whose strings may
contain the tags; any other value is emitted when its tag closes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from zmqengine_client.text.tool_calls.json_arguments import JsonArguments, escaped
from zmqengine_client.text.tool_calls.schema_types import (
    argument_types,
    convert_text,
    property_names,
    without_padding,
)

TAG_CHARS_MAX = 1000
"""The longest tag that is waited for, and white space behind one."""
_NAMED_TAG = re.compile(r"<([\w.-]+)>")


class Tags(NamedTuple):
    """The tags around values.

    `opening` matches the tags before a value; its group `key` is the key, its group `declared`, if any, the type
    that the tag states. `within` matches a prefix of an opening tag, which begins with one of `openings`. A value is
    followed by one of `closings`, the last value by one of `ends`. `calls` begin the next call. `padded`: line breaks
    at both ends of a value always belong to its tags.
    """

    opening: re.Pattern[str]
    within: re.Pattern[str]
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    ends: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    padded: bool = False


class TaggedArguments:
    """An `ArgumentsParser` of tagged values, from the text after the function's name.

    The arguments end with one of the tags' `ends`, which is consumed, or before `call_end`, which stays in
    `rest`. Unknown tags are skipped. An object in JSON in place of the tags is the arguments, and a tag with the name
    of an argument is its value's.
    """

    def __init__(self, parameters: Mapping[str, object], tags: Tags, call_end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._parameters = parameters
        self._tags = tags
        self._call_end = call_end
        self._awaited = set(property_names(parameters))
        self._kinds: frozenset[str] = frozenset()
        self._state = "start"
        self._value = ValueText(tags, call_end, self._awaited)
        self._nested: JsonArguments | None = None
        self._whole: list[str] = []
        self._is_object = False
        self._count = 0

    def feed(self, text: str) -> str:
        """Parse more text; returns the JSON it adds."""
        self.rest += text
        pieces = []
        if self._state == "start" and (first := self.rest.lstrip()[:1]):
            self._state = "between"
            if first == "{":
                self._nested, self._state, self._is_object = JsonArguments(), "nested", True
            else:
                pieces.append("{")
        if self._state == "start":
            return ""
        while not (self.done or self.broken):
            piece = self._step()
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """Parse the end of the output: a value that no tag closes ends with the call, if the call is closed."""
        text = self.rest.rstrip()
        closed = bool(self._call_end) and text.endswith(self._call_end)
        if not closed or self._state not in ("text", "whole"):
            return ""
        text = text.removesuffix(self._call_end).rstrip()
        for end in self._tags.ends:
            text = text.removesuffix(end)
        self.rest = ""
        return self._ended(text) + self._end()

    def _step(self) -> str | None:
        if self._state == "between":
            return self._between()
        if self._state == "opened":
            return self._opened()
        if self._state == "nested":
            return self._nested_piece()
        text, closed, self.rest = self._value.take(self.rest)
        if closed:
            return self._ended(text)
        if not text:
            return None
        if self._state == "text":
            return escaped(text)
        self._whole.append(text)
        return ""

    def _between(self) -> str | None:
        place = self.rest.find("<")
        if place < 0:
            self.rest = ""
            return None
        self.rest = self.rest[place:]
        opened = None if self._is_object else self._tags.opening.match(self.rest)
        if opened:
            self.rest = self.rest[opened.end() :]
            return self._open(opened["key"].strip(), opened.groupdict().get("declared"))
        for end in self._tags.ends:
            if self.rest.startswith(end):
                self.rest = self.rest[len(end) :]
                return self._end()
        if self._call_end and self.rest.startswith(self._call_end):
            return self._end()
        if self.rest.startswith(self._tags.calls):
            # Without an argument: a call that is not closed, or one that is opened twice.
            self.broken = not self._count and not self._is_object
            return "" if self.broken else self._end()
        named = _NAMED_TAG.match(self.rest)
        if not self._is_object and named and named[1] in self._awaited:
            self.rest = self.rest[named.end() :]
            return self._open(named[1], None, named[0])
        if self._may_open():
            return None
        self.rest = self.rest[1:]
        return ""

    def _open(self, key: str, declared: str | None, tag: str = "") -> str:
        self._kinds = argument_types(self._parameters, key, declared)
        self._awaited.discard(key)
        self._state = "opened"
        tags = self._tags
        if tag:
            others = (f"<{other}>" for other in self._awaited)
            tags = tags._replace(closings=(f"</{tag[1:]}",), calls=(*tags.calls, *others))
        self._value = ValueText(tags, self._call_end, self._awaited)
        comma = "," if self._count else ""
        self._count += 1
        return f'{comma}"{escaped(key)}":'

    def _end(self) -> str:
        self.done = True
        return "" if self._is_object else "}"

    def _may_open(self) -> bool:
        """Whether the held text is a prefix of one of the tags."""
        if any(end.startswith(self.rest) for end in (*self._tags.ends, *self._tags.calls, self._call_end)):
            return True
        return len(self.rest) < TAG_CHARS_MAX and self._tags.within.fullmatch(self.rest) is not None

    def _opened(self) -> str | None:
        """Decide how the value is read: as text, as an object or a list, or as a whole."""
        start = self.rest[:TAG_CHARS_MAX].lstrip()
        beside_text = not self._kinds or "string" in self._kinds
        if "string" in self._kinds:
            is_null = self._is_null(start) if "null" in self._kinds else False
            if is_null is None and len(self.rest) < TAG_CHARS_MAX:
                return None
            if not is_null:
                return self._begin_text() if self.rest else None
        elif not beside_text and start.startswith(("{", "[")):
            self._state, self._nested = "nested", JsonArguments(arrays=True)
            return ""
        elif not start and len(self.rest) < TAG_CHARS_MAX:
            return None
        self._state = "whole"
        return ""

    def _is_null(self, start: str) -> bool | None:
        """Whether a value that may be text is null; None if that depends on the text to come."""
        if "null".startswith(start[:4]) and len(start) < 4:
            return None
        behind = start[4:].lstrip()
        if not start.startswith("null"):
            return False
        if behind.startswith(self._value.tags):
            return True
        return None if any(tag.startswith(behind) for tag in self._value.tags) else False

    def _begin_text(self) -> str:
        self._state = "text"
        self._value.padded = self._tags.padded or self.rest.startswith("\n")
        self.rest = self.rest.removeprefix("\n")
        return '"'

    def _ended(self, text: str) -> str:
        """The JSON of a value whose last piece this is."""
        if self._state == "text":
            self._state = "between"
            if self._tags.padded and (line := text.rstrip(" \t")).endswith("\n"):
                text = line
            return escaped(text.removesuffix("\n") if self._value.padded else text) + '"'
        text, self._whole, self._state = "".join((*self._whole, text)), [], "between"
        value = convert_text(without_padding(text, always=self._tags.padded), self._kinds)
        return msgspec.json.encode(value).decode()

    def _nested_piece(self) -> str | None:
        nested = self._nested
        assert nested is not None
        text, self.rest = nested.feed(self.rest), ""
        if nested.done or nested.broken:
            self.rest, nested.rest = nested.rest, ""
            # Its closing tag is skipped like any text between values.
            self._state = "between"
        self.broken = nested.broken
        return text or ("" if nested.done else None)


class ValueText:
    """Finds the end of a value in text that comes piece by piece.

    A value ends before a closing tag that is followed by the tag of another value, the end of the call or the next
    call: text may hold the closing tag too. Where the closing tag is missing, it ends before the tag of another value
    that is `awaited`, or before the end of the call. Some white space is held back: with `padded` a line break before
    the tag is the tag's.
    """

    def __init__(self, tags: Tags, call_end: str, awaited: frozenset[str] | set[str]) -> None:
        self.padded = tags.padded
        self.tags = (*tags.closings, *tags.ends, *filter(None, [call_end]))
        self._shape = tags
        self._call_end = call_end
        self._awaited = awaited
        self._begun = False
        self._behind = (*tags.openings, *tags.ends, *tags.calls, *filter(None, [call_end]))
        marks = sorted({*self.tags, *tags.openings}, key=len, reverse=True)
        self._marks = marks
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._partial = re.compile(rf"(?:{'|'.join(map(re.escape, _prefixes(marks)))})\Z")

    def take(self, text: str) -> tuple[str, bool, str]:
        """The text that is certainly the value's, whether the value ends with it, and the rest."""
        at = 0
        while True:
            found = self._mark.search(text, at)
            if not found:
                held = self._partial.search(text, max(at, len(text) - max(map(len, self._marks))))
                return self._cut(text, held.start() if held else len(text))
            closing = self._closing(text, found)
            if closing is None:
                return self._cut(text, found.start())
            if closing >= 0:
                value = text[: found.start()]
                # Without its closing tag, a value ends before the line of the next one.
                missing = closing == found.start() and not self.padded
                return value.removesuffix("\n") if missing else value, True, text[closing:]
            at = found.start() + 1

    def _cut(self, text: str, end: int) -> tuple[str, bool, str]:
        # Held back: a line break and an indentation before a tag may be the tag's.
        line = text[:end].rstrip(" \t")
        if line.endswith("\n") and end - len(line) < TAG_CHARS_MAX:
            end = len(line) - 1
        self._begun = self._begun or end > 0
        return text[:end], False, text[end:]

    def _closing(self, text: str, mark: re.Match[str]) -> int | None:
        """The index from which the text goes on if the value ends at a mark; -1 if it does not, None if that depends
        on the text to come."""
        tag = mark[0]
        if tag in self._shape.openings:
            return self._opening(text, mark.start())
        behind = text[mark.end() : mark.end() + TAG_CHARS_MAX].lstrip()
        if tag == self._call_end and tag not in self._shape.ends:
            # Only the start of the next call tells it from text.
            follows = () if self._shape.ends else self._shape.calls
        elif tag in self._shape.ends:
            follows = (*filter(None, [self._call_end]), *self._shape.calls)
        else:
            follows = self._behind
        if behind.startswith(follows):
            return mark.end() if tag in self._shape.closings else mark.start()
        undecided = not behind or any(follow.startswith(behind) for follow in follows)
        too_long = len(text) - mark.end() >= TAG_CHARS_MAX
        return None if undecided and not too_long else -1

    def _opening(self, text: str, at: int) -> int | None:
        if self.padded and (text[at - 1] != "\n" if at else self._begun):
            return -1
        opened = self._shape.opening.match(text, at)
        if opened:
            return at if opened["key"].strip() in self._awaited else -1
        part = text[at : at + TAG_CHARS_MAX]
        may = len(part) < TAG_CHARS_MAX and self._shape.within.fullmatch(part)
        return None if may else -1


def _prefixes(marks: list[str]) -> list[str]:
    """The proper prefixes of marks, the longest first."""
    return sorted({mark[:length] for mark in marks for length in range(1, len(mark))}, key=len, reverse=True)
