"""The description of a tool-call format: the markers around calls, and parsers of the text between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from zmqengine_client.text.tool_calls.call_layout import CallLayout, chosen, write_calls
from zmqengine_client.text.tool_calls.json_arguments import ArgumentsParser, JsonArguments
from zmqengine_client.text.tool_calls.lenient_json import Malformed

Schemas = Mapping[str, Mapping[str, object]]
"""The `parameters` schema of each offered function, by name."""


class ParsedCall(NamedTuple):
    """A parsed call: the function's name and its arguments."""

    name: str
    arguments: dict[str, object]


def _read_json(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    return JsonArguments()


class CallFormat(NamedTuple):
    """A format of tool calls, between the markers `start` and `end`; an empty `end` is the end of the output.
    `blocks` are pairs of markers that models of other versions write instead. `name` identifies the format.

    Arguments are streamed while they are generated: `header` matches the text before the arguments of a call,
    and its one group that matched is the function's name; `read` makes a parser of the arguments from the
    function's parameters and `end`, None if calls are not streamed; `tail` matches the text that closes the call
    after them. `call_end` ends a call that is not streamed.

    `parse`, where there is one, parses complete text between the markers that `header` does not match, given the
    schemas; raises `Malformed`. `bare`: an output that begins with `{` is a call without a marker.

    `shapes` are the beginnings of a call behind `start`, with NAME for the function's, and `wholes` those that `parse`
    alone takes: text behind `start` that is none of these is no call. `opener` is the text that a call begins with
    where `start` was left out; without one, such a call begins a line, if `loose`. One of `follows`, if any, comes
    behind the header of a call.

    `layouts` say how the family's templates write calls, and so how they are constrained, if `constrained`: not
    where too little is known of what stands around them. `written_id` is the form of the ids that
    the model writes, of the function's `name` and the call's `index` in the conversation; empty if it writes none.
    """

    start: str
    end: str
    header: re.Pattern[str]
    tail: re.Pattern[str] = re.compile("")
    read: Callable[[Mapping[str, object], str], ArgumentsParser] | None = _read_json
    parse: Callable[[str, Schemas], list[ParsedCall]] | None = None
    bare: bool = False
    written_id: str = ""
    name: str = ""
    blocks: tuple[tuple[str, str], ...] = ()
    shapes: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    opener: str = ""
    loose: bool = False
    follows: tuple[str, ...] = ()
    call_end: str = ""
    layouts: tuple[CallLayout, ...] = ()
    constrained: bool = True

    def write(self, calls: Sequence[ParsedCall], template: str = "") -> str:
        """Calls, markers included, for chat templates that cannot write them; an empty text without a layout."""
        if not self.layouts:
            return ""
        layout = chosen(self.layouts, lambda text: text in template)[0]
        return f"{self.start}{write_calls(layout, calls)}"

    def is_blank(self, text: str) -> bool:
        """Whether a text tells nothing yet of the call that may begin with it."""
        return not text.translate(_SQUEEZED)

    def may_begin(self, text: str, names: Collection[str] | None) -> bool:
        """Whether a call of one of the names, or of any, may begin with this text and go on in the text to come."""
        squeezed = text[:HEADER_CHARS_MAX].translate(_SQUEEZED)
        shapes = self.shapes if names is not None else (*self.shapes, *self.wholes)
        if not shapes:
            return True
        return any(_may_become(shape.translate(_SQUEEZED), squeezed, names) for shape in shapes)


HEADER_CHARS_MAX = 512
"""The longest header of a call whose arguments are streamed: names have up to 64 characters, ids less. It is matched
again with each token, so it has a bound; a call with more before its arguments is parsed as a whole."""
_SQUEEZED = str.maketrans("", "", " \t\r\n\"'[]")
_ANY_NAME = re.compile(r"[\w.-]*")


def _may_become(shape: str, text: str, names: Collection[str] | None) -> bool:
    before, named, behind = shape.partition("NAME")
    if len(text) <= len(before):
        return before.startswith(text)
    if not text.startswith(before) or not named:
        return text.startswith(before)
    text = text[len(before) :]
    if names is None:
        matched = _ANY_NAME.match(text)
        assert matched
        return bool(matched[0]) and _agree(text[matched.end() :], behind)
    return any(
        name.startswith(text) or (text.startswith(name) and _agree(text[len(name) :], behind))
        for name in names
    )


def _agree(text: str, expected: str) -> bool:
    return text.startswith(expected) or expected.startswith(text)


def skip(text: str, at: int, characters: str = " \t\r\n") -> int:
    """The index of the first character from `at` on that is none of these."""
    end = len(text)
    while at < end and text[at] in characters:
        at += 1
    return at


def nonempty(calls: list[ParsedCall]) -> list[ParsedCall]:
    """The calls, unchanged. Raises `Malformed` if there are none."""
    if not calls:
        raise Malformed("no call")
    return calls


def as_arguments(value: object) -> dict[str, object]:
    """The arguments of a call: an object, or null for none. Raises `Malformed` for any other value."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed("arguments are an object")
    return value
