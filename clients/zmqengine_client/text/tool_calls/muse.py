"""Parses the messages of Muse by their address: itself (reasoning), a function (a call), or none (content).

An output is a sequence of messages `<|start|>assistant to=NAME<|message|>TEXT<|eom|>`. The prompt ends inside
the first header.
"""

from __future__ import annotations

import re

from zmqengine_client.text.tool_calls.call_format import CallFormat, Schemas
from zmqengine_client.text.tool_calls.deltas import Delta, Kind, earliest, overlap
from zmqengine_client.text.tool_calls.markers import Markers
from zmqengine_client.text.tool_calls.splitter import MarkerSplitter

HEADER_CHARS_MAX = 300
_MESSAGE = "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>", "<|start|>")
_ADDRESS = re.compile(r"\bto=([\w.-]+)")


class MuseSplitter:
    """A `TextSplitter` for addressed messages; calls are in the format `calls`, or content if that is
    None."""

    def __init__(self, calls: CallFormat | None, schemas: Schemas) -> None:
        self.saw_call = False
        self.incomplete_call = False
        self._calls = calls
        self._schemas = schemas
        self._held = ""
        self._in_header = True
        self._kind: Kind = "content"
        self._inside: MarkerSplitter | None = None

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning or its header."""
        return self._kind == "reasoning" if not self._in_header else "to=self" in self._held

    def feed(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that are certain."""
        self._held += text
        deltas: list[Delta] = []
        while self._held and (self._read_header() if self._in_header else self._read_body(deltas)):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Parse the end of the output; returns the remaining deltas."""
        held, self._held = self._held, ""
        if self._in_header:
            return (
                [Delta("content", held)] if held and not held.startswith((" to=", "<|", "assistant")) else []
            )
        return self._deltas_of(held) + self._end_inside()

    def _read_header(self) -> bool:
        place = self._held.find(_MESSAGE)
        if place < 0 and len(self._held) <= HEADER_CHARS_MAX:
            return False
        header = self._held[: max(place, 0)]
        self._held = self._held[place + len(_MESSAGE) :] if place >= 0 else self._held
        address = _ADDRESS.search(header)
        self._in_header = False
        self._kind = "reasoning" if address and address[1] == "self" else "content"
        if address and self._kind == "content" and self._calls:
            self._inside = MarkerSplitter(Markers(calls=self._calls), calls=True, schemas=self._schemas)
        return True

    def _read_body(self, deltas: list[Delta]) -> bool:
        place, end = earliest(self._held, _ENDS)
        if not end:
            sure = len(self._held) - max(overlap(self._held, mark) for mark in _ENDS)
            text, self._held = self._held[:sure], self._held[sure:]
            deltas += self._deltas_of(text)
            return False
        text, self._held = self._held[:place], self._held[place + len(end) :]
        deltas += self._deltas_of(text)
        deltas += self._end_inside()
        self._in_header = True
        return True

    def _deltas_of(self, text: str) -> list[Delta]:
        if self._inside is None:
            return [Delta(self._kind, text)] if text else []
        deltas = self._inside.feed(text)
        self.saw_call = self.saw_call or self._inside.saw_call
        return deltas

    def _end_inside(self) -> list[Delta]:
        inside, self._inside = self._inside, None
        if inside is None:
            return []
        deltas = inside.finish()
        self.incomplete_call |= inside.incomplete_call
        self.saw_call = self.saw_call or inside.saw_call
        return deltas
