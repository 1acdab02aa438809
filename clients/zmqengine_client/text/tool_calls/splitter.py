"""Splits the text of one output, as it is generated, into reasoning, content and tool calls.

No text is lost: text between call markers that is not a call becomes content. From its name and the start of
its arguments on, a call is streamed; the rest of the text between the markers is syntax of the format.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from zmqengine_client.text.tool_calls.call_format import HEADER_CHARS_MAX, CallFormat, Schemas, skip
from zmqengine_client.text.tool_calls.content_edges import ContentEdges, LineStarts
from zmqengine_client.text.tool_calls.deltas import Delta, Kind, TextUpTo, earliest, overlap
from zmqengine_client.text.tool_calls.json_arguments import ArgumentsParser
from zmqengine_client.text.tool_calls.lenient_json import Malformed
from zmqengine_client.text.tool_calls.markers import Markers

_BETWEEN = " \t\r\n;,"
_FENCE = re.compile(r"```(?:json)?\s*(?=[\[{])")
State = Literal["content", "reasoning", "call"]


class MarkerSplitter:
    """A `TextSplitter` for models with markers around reasoning and calls.

    `reasoning_open`: the prompt ended with the marker that starts reasoning. `calls`: tools were offered;
    otherwise call markers are text.
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
        self._blanks: list[str] = []
        self._unstreamed: TextUpTo | None = None
        self._arguments: ArgumentsParser | None = None
        self._streamed = False
        self._end = ""
        self._ends: list[str] = []
        self._unmarked = False
        self._orphan_end = False
        self._final = False
        self._trim_newlines = reasoning_open
        self._at_start = not reasoning_open
        self._may_reopen = reasoning_open and bool(markers.think_start)
        self._edges = ContentEdges(markers.think_end)
        self._lines = LineStarts()
        self._starts = self._call_starts()
        self.saw_call = False
        self.incomplete_call = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that are certain."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Parse the end of the output; returns the remaining deltas."""
        self._final = True
        deltas = self.feed("") if self._state != "call" else []
        return deltas + self._finish_held()

    def _finish_held(self) -> list[Delta]:
        if self._state == "call" and self._streamed:
            return self._finish_streamed()
        held = self._inside_call() if self._state == "call" else self._held
        self._held = ""
        if self._state == "content":
            held = self._edges.content(held)
        if self._state == "call":
            deltas = self._parsed(held, complete=not (self._format and self._format.end))
            self.incomplete_call |= any(delta.kind == "content" for delta in deltas)
            return deltas
        return [Delta(self._state, held)] if held else []

    def _finish_streamed(self) -> list[Delta]:
        if self._arguments is not None:
            # Arguments that the output cuts off have been streamed up to there.
            text = self._arguments.finish()
            whole = self._arguments.done
            self.incomplete_call |= not whole
            deltas = [Delta("call_text", text)] if text else []
            return [*deltas, Delta("call_end", "")] if whole or self._arguments.broken else deltas
        return self._remaining_calls(self._inside_call())

    def _inside_call(self) -> str:
        """The text of a call so far that was not streamed."""
        unstreamed = self._unstreamed.text if self._unstreamed is not None else ""
        return "".join((*self._blanks, unstreamed, self._held))

    def _advance(self, deltas: list[Delta]) -> bool:
        """Parse one step of the held text; False if more text is needed."""
        if self._trim_newlines and self._held:
            self._held = self._held.lstrip("\n")
            self._trim_newlines = not self._held
        if not self._held:
            return False
        if self._state == "call":
            return self._advance_call(deltas)
        if self._may_reopen:
            return self._skip_second_start()
        if self._state == "content":
            rest = self._edges.after_leading_end(self._held)
            if rest is not None:
                self._held, self._trim_newlines = rest, True
                return True
            if self._edges.may_become_leading_end(self._held):
                return False
            if self._begins_bare_call():
                return True
        return self._advance_text(deltas, self._state)

    def _skip_second_start(self) -> bool:
        """Drop the marker of reasoning that a model repeats behind the prompt's; False if more text is needed."""
        start = self._markers.think_start
        if len(self._held) < len(start) and start.startswith(self._held) and not self._final:
            return False
        self._trim_newlines = self._held.startswith(start)
        self._held = self._held.removeprefix(start)
        self._may_reopen = False
        return True

    def _advance_text(self, deltas: list[Delta], kind: Kind) -> bool:
        if kind == "content" and self._orphan_end:
            return self._skip_orphan_end()
        if kind == "content" and self._format and self._format.loose and self._lines.at_start:
            begins = self._begins_named_call(self._held)
            if begins is None and not self._final:
                return False
            if begins:
                self._begin("", unmarked=True)
                return True
        sought = self._markers_sought()
        place, marker = earliest(self._held, sought)
        if not marker:
            keep = max((overlap(self._held, each) for each in sought), default=0)
            self._emit(deltas, kind, len(self._held) - keep)
            return False
        if marker == self._markers.think_start and kind == "content" and self._held[:place].strip():
            # The content begins before the marker, which so is a mention of it.
            self._emit(deltas, kind, place)
            return True
        self._emit(deltas, kind, place)
        if marker in self._starts:
            return self._advance_start(deltas, kind, marker)
        if marker == "\n":
            self._emit(deltas, kind, 1)
            return True
        self._held = self._held[len(marker) :]
        if kind == "reasoning" or marker == self._markers.think_start:
            self._state = "reasoning" if marker == self._markers.think_start else "content"
            self._trim_newlines = True
        return True

    def _advance_start(self, deltas: list[Delta], kind: Kind, marker: str) -> bool:
        """Decide whether the marker at the start of the held text begins a call; False if more text is needed."""
        assert self._format
        unmarked = marker == self._format.opener
        inside = self._held if unmarked else self._held[len(marker) :]
        if unmarked or kind == "reasoning":
            begins = self._begins_named_call(inside)
        else:
            begins = self._may_begin(inside)
            if begins and len(inside) < HEADER_CHARS_MAX and self._format.is_blank(inside):
                begins = None
        if begins is None and not self._final:
            return False
        if begins:
            self._begin("" if unmarked else marker, unmarked=unmarked)
        else:
            self._emit(deltas, kind, len(marker))
        return True

    def _begins_named_call(self, text: str) -> bool | None:
        """Whether a text begins with a call of an offered function; None if that depends on the text to come.

        Prose and reasoning may mention a marker, so the header is not enough where something has to follow it.
        """
        format_ = self._format
        assert format_
        text = text[:HEADER_CHARS_MAX]
        header = format_.header.match(text)
        if header is None:
            may = bool(text.strip()) or len(text) < HEADER_CHARS_MAX
            may = may and len(text) < HEADER_CHARS_MAX and format_.may_begin(text, self._schemas)
            may = may and not (self._markers.think_end and self._markers.think_end in text)
            return None if may else False
        if self._offered(next(group for group in header.groups() if group)) not in self._schemas:
            return False
        follows = (*format_.follows, *([format_.end] if format_.end and format_.follows else []))
        behind = text[header.end() :].lstrip()
        if not follows or behind.startswith(follows):
            return True
        return None if any(each.startswith(behind) for each in follows) else False

    def _begin(self, start: str, *, unmarked: bool) -> None:
        """Begin a call, whose marker `start` is dropped."""
        assert self._format
        self._state, self._call_start, self._unmarked = "call", start, unmarked
        blocks = dict(self._format.blocks)
        self._end = blocks.get(start, self._format.end)
        if unmarked and self._format.read is None:
            self._end = self._format.call_end
        # The end of any version closes a block of any other.
        self._ends = [self._end, self._format.end, *blocks.values()]
        self._held = self._held[len(start) :]

    def _skip_orphan_end(self) -> bool:
        """Drop the end marker behind a call that had no start marker; False if more text is needed."""
        assert self._format
        # Calls may stand in a list, whose bracket closes behind the last.
        text = self._held.lstrip(_BETWEEN + "]")
        ends = [end for end in (self._format.end, *(end for _, end in self._format.blocks)) if end]
        found = next((end for end in ends if text.startswith(end)), "")
        undecided = not text or (not found and any(end.startswith(text) for end in ends))
        if undecided and not self._final and len(self._held) < HEADER_CHARS_MAX:
            return False
        if found or "]" in self._held[: len(self._held) - len(text)]:
            self._held = text[len(found) :]
        self._orphan_end = False
        self._trim_newlines = True
        return True

    def _advance_call(self, deltas: list[Delta]) -> bool:
        assert self._format
        if self._arguments is not None and not self._arguments.broken:
            return self._advance_arguments(deltas, self._arguments)
        if self._unmarked and self._streamed and self._arguments is None:
            return self._end_unmarked()
        if self._unstreamed is None and self._begin_call(deltas):
            return True
        undecided = self._unstreamed is None and bool(self._call_start) and not self._streamed
        if undecided and not self._may_begin(self._held):
            return self._release(deltas)
        ends = [end for end in self._ends if end] if self._call_start or self._unmarked else []
        if self._unstreamed is None and (
            len(self._held) > HEADER_CHARS_MAX or any(end in self._held for end in ends)
        ):
            self._unstreamed = TextUpTo(ends)
        if self._unstreamed is None:
            return False
        found = self._unstreamed.feed(self._held)
        self._held = ""
        if found is None:
            return False
        inside = self._inside_call()
        self._held = found[1]
        self._blanks, self._unstreamed = [], None
        if self._arguments is not None:
            self.incomplete_call = True
            deltas.append(Delta("call_end", ""))
        elif self._streamed:
            deltas += self._remaining_calls(inside)
        else:
            end = found[0]
            deltas += self._parsed(inside + (end if self._unmarked else ""), complete=True, end=end)
        self._state, self._streamed, self._arguments, self._unmarked = "content", False, None, False
        # White space between calls, and after the last, is syntax of the format.
        self._trim_newlines = self.saw_call
        if self.saw_call:
            self._edges.after_call()
        return True

    def _may_begin(self, inside: str) -> bool:
        """Whether a call may begin with the text behind a marker."""
        assert self._format
        return self._format.header.match(inside[:HEADER_CHARS_MAX]) is not None or self._format.may_begin(
            inside, None
        )

    def _release(self, deltas: list[Delta]) -> bool:
        """Go on with content: the marker and the text behind it are no call."""
        self._held = "".join((self._call_start, *self._blanks, self._held))
        self._state, self._blanks = "content", []
        self._emit(deltas, "content", len(self._call_start))
        return True

    def _end_unmarked(self) -> bool:
        """End a call that had no start marker, behind its tail; False if more text is needed."""
        assert self._format
        tail = self._format.tail.match(self._held)
        text = self._held.lstrip()
        behind = self._held[tail.end() if tail else 0 :].lstrip()
        if tail and behind in ("", "`", "``") and not self._final and len(self._held) < HEADER_CHARS_MAX:
            # A tail may end with a fence, and the next call of a list may follow it.
            return False
        is_listed, opener = behind.startswith((",", ";")), self._format.opener
        if is_listed or (opener and behind.startswith(opener)):
            following = behind[1:].lstrip() if is_listed else behind
            begins = self._begins_named_call(following)
            if begins is None and not self._final:
                return False
            if begins:
                self._held, self._streamed = following, False
                return True
        if tail and (tail.end() or text):
            return self._leave_unmarked(tail.end())
        # The tail may be incomplete.
        if len(self._held) < HEADER_CHARS_MAX and text[:1] in ("", ",", "`", "<"):
            return False
        return self._leave_unmarked(0)

    def _leave_unmarked(self, tail: int) -> bool:
        self._held = self._held[tail:]
        self._state, self._streamed, self._unmarked, self._orphan_end = "content", False, False, True
        self._trim_newlines = True
        self._edges.after_call()
        self._lines.at_start = True
        return True

    def _begin_call(self, deltas: list[Delta]) -> bool:
        """Parse the header of a call whose arguments are streamed; False if it is not complete."""
        assert self._format
        if self._arguments is not None or self._format.read is None:
            return False
        text = self._held.lstrip()
        if self._call_start and not self._streamed and (fence := _FENCE.match(text)):
            text = text[fence.end() :]
        if len(text) < len(self._held):
            # Skipped once: each token would skip all that came before it again.
            self._blanks.append(self._held[: len(self._held) - len(text)])
            self._held = text
        start, text = 0, text[:HEADER_CHARS_MAX]
        if self._streamed:
            # The tail of the call before may be left out, and its end too.
            tail = self._format.tail.match(text)
            start = skip(text, tail.end() if tail else 0, _BETWEEN)
            while self._call_start and text.startswith(self._call_start, start):
                start = skip(text, start + len(self._call_start))
        header = self._format.header.match(text, start)
        if not header:
            return False
        self._held = self._held[header.end() :]
        self._blanks = []
        name = self._offered(next(group for group in header.groups() if group))
        self._arguments = self._format.read(self._schemas.get(name, {}), self._end)
        self._streamed = self.saw_call = True
        deltas.append(Delta("call_start", "", name))
        return True

    def _offered(self, name: str) -> str:
        """The name of a function as it was offered: models write it with a namespace, as in `functions.NAME`."""
        return offered_name(name, self._schemas)

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

    def _remaining_calls(self, inside: str) -> list[Delta]:
        """Calls after a streamed one that were not streamed; other text is syntax of the format."""
        assert self._format
        tail = self._format.tail.match(inside)
        # Calls may stand in a list, whose bracket closes behind the last.
        text = inside[tail.end() if tail else 0 :].strip(_BETWEEN + "]`")
        calls = (parse_calls(text, self._format, self._schemas) or []) if text else []
        self.incomplete_call |= bool(text) and not calls
        return calls

    def _parsed(self, inside: str, *, complete: bool, end: str = "") -> list[Delta]:
        """The calls in a text, or the text itself as content if it is no calls."""
        assert self._format
        calls = parse_calls(inside, self._format, self._schemas) if complete else None
        if calls is None:
            return [Delta("content", self._call_start + inside + end)]
        self.saw_call = True
        return calls

    def _begins_bare_call(self) -> bool:
        """Whether the output begins with `{` in a format where that is a call."""
        if not self._at_start or not (self._format and self._format.bare):
            return False
        first = self._held.lstrip()[:1]
        if first == "{":
            self._state, self._call_start = "call", ""
        self._at_start = not first
        return first == "{"

    def _call_starts(self) -> list[str]:
        """The markers that a call may begin with."""
        if self._format is None:
            return []
        starts = [self._format.start, *(start for start, _ in self._format.blocks)]
        return [start for start in (*starts, self._format.opener) if start]

    def _markers_sought(self) -> list[str]:
        if self._state == "reasoning":
            return [each for each in (self._markers.think_end, *self._starts) if each]
        line = ["\n"] if self._format and self._format.loose else []
        # Once the content has begun, the marker of reasoning is a mention of it.
        start = [self._markers.think_start] if self._markers.think_start and self._edges.at_start else []
        return [*start, *self._starts, *self._markers.frames, *line]

    def _emit(self, deltas: list[Delta], kind: Kind, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if kind == "content":
            self._lines.pass_over(text)
            text = self._edges.content(text)
        if text:
            deltas.append(Delta(kind, text))


def offered_name(name: str, schemas: Schemas) -> str:
    """The offered name that a name with a namespace ends with; else the name itself."""
    rest = name = name.strip()
    while rest not in schemas and "." in rest:
        rest = rest.partition(".")[2]
    return rest if rest in schemas else name


def parse_calls(text: str, format_: CallFormat, schemas: Schemas) -> list[Delta] | None:
    """The calls in a complete text that was not streamed, or None if it is malformed."""
    if format_.parse is None:
        return None
    try:
        return [
            Delta("call", msgspec.json.encode(call.arguments).decode(), offered_name(call.name, schemas))
            for call in format_.parse(text, schemas)
        ]
    except (Malformed, RecursionError, msgspec.MsgspecError, UnicodeError):
        return None
