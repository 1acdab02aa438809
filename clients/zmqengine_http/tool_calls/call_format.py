"""The description of a tool-call format: the markers around calls, and parsers of the text between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zmqengine_http.tool_calls.json_arguments import ArgumentsParser, JsonArguments
from zmqengine_http.tool_calls.lenient_json import Malformed

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

    Arguments are streamed while they are generated: `header` matches the text before the arguments of a call,
    and its one group that matched is the function's name; `read` makes a parser of the arguments from the
    function's parameters and `end`; `tail` matches the text that closes the call after them.

    `parse`, where there is one, parses complete text between the markers that `header` does not match, given the
    schemas; raises `Malformed`. `bare`: an output that begins with `{` is a call without a marker.

    `write` renders calls, markers included, for chat templates that cannot. `written_id` is the form of the ids that
    the model writes, of the function's `name` and the call's `index` in the conversation; empty if it writes none.
    `name` identifies the format.
    """

    start: str
    end: str
    header: re.Pattern[str]
    tail: re.Pattern[str] = re.compile("")
    read: Callable[[Mapping[str, object], str], ArgumentsParser] = _read_json
    parse: Callable[[str, Schemas], list[ParsedCall]] | None = None
    bare: bool = False
    write: Callable[[Sequence[ParsedCall]], str] | None = None
    written_id: str = ""
    name: str = ""


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
