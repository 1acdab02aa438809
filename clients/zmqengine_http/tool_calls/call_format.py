"""A format of tool calls: where a call starts and ends in a model's text, and a parser for what is
between."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zmqengine_http.tool_calls.lenient import Malformed
from zmqengine_http.tool_calls.streamed import ArgumentsParser, JsonArguments

Schemas = Mapping[str, Mapping[str, object]]
"""The `parameters` of each offered function, by name."""


class ParsedCall(NamedTuple):
    """A function to call, and with what."""

    name: str
    arguments: dict[str, object]


def _read_json(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    return JsonArguments()


class CallFormat(NamedTuple):
    """Where calls are in the text. With an empty `end` they go on to the end of the output.

    `parse` gets what is between and the schemas; it raises `Malformed`. `bare`: an output that begins with
    `{` is a call as well, without any marker. Arguments are told while they are written: `header` matches
    what stands before those of a call, with the name as the one group that matched; `read` makes what reads
    them, from the parameters of the function and `end`; `tail` matches what closes the call behind them.
    `write` is the text of calls, markers and all, in formats whose templates may leave that to who uses them.
    `name` is the format's own.
    """

    start: str
    end: str
    parse: Callable[[str, Schemas], list[ParsedCall]]
    header: re.Pattern[str]
    tail: re.Pattern[str] = re.compile("")
    read: Callable[[Mapping[str, object], str], ArgumentsParser] = _read_json
    bare: bool = False
    write: Callable[[Sequence[ParsedCall]], str] | None = None
    name: str = ""


def some(calls: list[ParsedCall]) -> list[ParsedCall]:
    """The calls. Raises `Malformed` if there are none."""
    if not calls:
        raise Malformed("no call")
    return calls


def as_arguments(value: object) -> dict[str, object]:
    """An object as arguments; null is none. Raises `Malformed` for all else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed("arguments are an object")
    return value
