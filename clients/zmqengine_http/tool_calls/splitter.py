"""Splits the text of one answer, as it comes, into reasoning, content and tool calls.

Nothing is lost: text that looked like a call and is none comes out as content. Once the name of a call and
the start of its arguments are there it is a call, told while it is written; what follows its arguments within
the markers is the format's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from zmqengine_http.tool_calls.call_format import CallFormat, Schemas
from zmqengine_http.tool_calls.deltas import Delta, Kind, overlap
from zmqengine_http.tool_calls.lenient import Malformed
from zmqengine_http.tool_calls.markers import Markers
from zmqengine_http.tool_calls.streamed import ArgumentsParser

_BETWEEN = " \t\r\n;,"
State = Literal["content", "reasoning", "call"]


class MarkerSplitter:
    """A `TextSplitter` for markers around reasoning and calls.

    `reasoning_open`: the prompt itself ended with the marker that starts reasoning. `calls`: whether tools
    were offered; without, markers of calls are text.
    """

    def __init__(
        self,
        markers: Markers,
        *,
        reasoning_open: bool = False,
        calls: bool = False,
        schemas: Schemas | None = None,
    ) -> None:
        self._markers = markers
        self._format: CallFormat | None = markers.calls if calls else None
        self._schemas = schemas or {}
        self._state: State = "reasoning" if reasoning_open else "content"
        self._held = ""
        self._call_start = ""
        self._arguments: ArgumentsParser | None = None
        self._streamed = False
        self._trim_newlines = reasoning_open
        self._at_start = not reasoning_open
        self._edges = ContentEdges(markers.think_end)
        self.saw_call = False

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning, as far as can be told."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Delta]:
        """What can be told of the answer after this text."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What is left at the end of the output."""
        if self._state == "call" and self._streamed:
            return self._finish_streamed()
        held, self._held = self._held, ""
        if self._state == "content":
            held = self._edges.content(held)
        if self._state == "call":
            return self._parsed(held, complete=not (self._format and self._format.end))
        return [Delta(self._state, held)] if held else []

    def _finish_streamed(self) -> list[Delta]:
        if self._arguments is not None:
            # The output was cut within the arguments: they are told as far as they came.
            return [Delta("call_end", "")] if self._arguments.broken else []
        return self._leftover(self._held)

    def _advance(self, deltas: list[Delta]) -> bool:
        """Take one step in what is held; False if more text is needed."""
        if self._trim_newlines and self._held:
            self._held = self._held.lstrip("\n")
            self._trim_newlines = not self._held
        if not self._held:
            return False
        if self._state == "call":
            return self._advance_call(deltas)
        if self._state == "content":
            rest = self._edges.begins_with_end(self._held)
            if rest is not None:
                self._held, self._trim_newlines = rest, True
                return True
            if self._edges.may_begin_with_end(self._held):
                return False
            if self._begins_bare_call():
                return True
        return self._advance_text(deltas, self._state)

    def _advance_text(self, deltas: list[Delta], kind: Kind) -> bool:
        place, marker = earliest(self._held, self._sought())
        if not marker:
            keep = max((overlap(self._held, sought) for sought in self._sought()), default=0)
            self._emit(deltas, kind, len(self._held) - keep)
            return False
        self._emit(deltas, kind, place)
        self._held = self._held[len(marker) :]
        if self._format and marker == self._format.start and kind == "content":
            self._state, self._call_start = "call", marker
        elif kind == "reasoning" or marker == self._markers.think_start:
            self._state = "reasoning" if marker == self._markers.think_start else "content"
            self._trim_newlines = True
        return True

    def _advance_call(self, deltas: list[Delta]) -> bool:
        assert self._format
        if self._arguments is not None and not self._arguments.broken:
            return self._advance_arguments(deltas, self._arguments)
        if self._begin_call(deltas):
            return True
        end = self._format.end if self._call_start else ""
        place = self._held.find(end) if end else -1
        if place < 0:
            return False
        inside, self._held = self._held[:place], self._held[place + len(end) :]
        if self._arguments is not None:
            deltas.append(Delta("call_end", ""))
        elif self._streamed:
            deltas += self._leftover(inside)
        else:
            deltas += self._parsed(inside, complete=True, end=end)
        self._state, self._streamed, self._arguments = "content", False, None
        # White space between two calls, and after the last, is part of the format.
        self._trim_newlines = self.saw_call
        if self.saw_call:
            self._edges.after_call()
        return True

    def _begin_call(self, deltas: list[Delta]) -> bool:
        """Take the start of a call whose arguments are to be streamed, if it is there."""
        assert self._format
        if self._arguments is not None:
            return False
        start = 0
        if self._streamed:
            tail = self._format.tail.match(self._held)
            if not tail:
                return False
            start = (
                tail.end() + len(self._held[tail.end() :]) - len(self._held[tail.end() :].lstrip(_BETWEEN))
            )
        header = self._format.header.match(self._held, start)
        if not header:
            return False
        self._held = self._held[header.end() :]
        name = next(group for group in header.groups() if group)
        self._arguments = self._format.read(self._schemas.get(name, {}), self._format.end)
        self._streamed = self.saw_call = True
        deltas.append(Delta("call_start", "", name))
        return True

    def _advance_arguments(self, deltas: list[Delta], reader: ArgumentsParser) -> bool:
        text = reader.feed(self._held)
        self._held = ""
        if text:
            deltas.append(Delta("call_text", text))
        if reader.done:
            deltas.append(Delta("call_end", ""))
            self._arguments = None
        if reader.done or reader.broken:
            self._held, reader.rest = reader.rest, ""
            return True
        return False

    def _leftover(self, inside: str) -> list[Delta]:
        """Calls behind a streamed one that were not streamed; the rest belongs to the format."""
        assert self._format
        tail = self._format.tail.match(inside)
        text = inside[tail.end() :].strip(_BETWEEN) if tail else ""
        return (whole_calls(text, self._format, self._schemas) or []) if text else []

    def _parsed(self, inside: str, *, complete: bool, end: str = "") -> list[Delta]:
        """The calls in a text, or the text itself where it holds none."""
        assert self._format
        calls = whole_calls(inside, self._format, self._schemas) if complete else None
        if calls is None:
            return [Delta("content", self._call_start + inside + end)]
        self.saw_call = True
        return calls

    def _begins_bare_call(self) -> bool:
        """Whether the answer begins with `{` in a format where that is a call."""
        if not self._at_start or not (self._format and self._format.bare):
            return False
        first = self._held.lstrip()[:1]
        if first == "{":
            self._state, self._call_start = "call", ""
        self._at_start = not first
        return first == "{"

    def _sought(self) -> list[str]:
        if self._state == "reasoning":
            return [self._markers.think_end]
        starts = [
            self._markers.think_start,
            self._format.start if self._format else "",
            *self._markers.frames,
        ]
        return [start for start in starts if start]

    def _emit(self, deltas: list[Delta], kind: Kind, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if kind == "content":
            text = self._edges.content(text)
        if text:
            deltas.append(Delta(kind, text))


def whole_calls(text: str, format_: CallFormat, schemas: Schemas) -> list[Delta] | None:
    """The calls in a text, None if it is no text of calls."""
    try:
        return [
            Delta("call", msgspec.json.encode(call.arguments).decode(), call.name)
            for call in format_.parse(text, schemas)
        ]
    except (Malformed, RecursionError, msgspec.MsgspecError, UnicodeError):
        return None


def earliest(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The first place of any of the markers, and which it is; -1 and none if there is none."""
    found = [(text.find(marker), marker) for marker in markers]
    return min(((place, marker) for place, marker in found if place >= 0), default=(-1, ""))


class ContentEdges:
    """Knows where the content begins, and what of it is only the space around calls.

    `think_end` ends the reasoning. Models that were told not to reason begin with it, and so do those that
    reason without the marker that starts it.
    """

    def __init__(self, think_end: str) -> None:
        self._think_end = think_end
        self._begun = False
        self._behind_call = False
        self._space = ""

    def begins_with_end(self, held: str) -> str | None:
        """What follows an end of reasoning that the content begins with; None if it begins otherwise."""
        text = held.lstrip()
        if self._begun or not self._think_end or not text.startswith(self._think_end):
            return None
        self._begun = True
        return text[len(self._think_end) :]

    def may_begin_with_end(self, held: str) -> bool:
        """Whether what is held may still become such an end."""
        return not self._begun and bool(self._think_end) and self._think_end.startswith(held.lstrip())

    def after_call(self) -> None:
        """A call has ended."""
        self._behind_call, self._space = True, ""

    def content(self, text: str) -> str:
        """What of a text is content: white space behind a call is none before something follows it."""
        if not text:
            return ""
        self._begun = True
        if not self._behind_call:
            return text
        if not text.strip():
            self._space += text
            return ""
        text, self._space, self._behind_call = self._space + text, "", False
        return text
