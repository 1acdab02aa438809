"""The output of splitters, and their protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "call_start", "call_text", "call_end"]


class Delta(NamedTuple):
    """A piece of the output: text of the content or the reasoning, or a call with `name` and JSON `text`.

    A streamed call is a `call_start` with its name, its JSON in pieces of `call_text`, and a `call_end`,
    which is missing if the output ends within the call.
    """

    kind: Kind
    text: str
    name: str = ""


class TextSplitter(Protocol):
    """An incremental parser of one output: `feed` text as it comes, then `finish`. Deltas come in order.

    `incomplete_call`: after `finish`, whether a call was cut or malformed.
    """

    saw_call: bool
    incomplete_call: bool

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""

    def feed(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that are certain."""

    def finish(self) -> list[Delta]:
        """Parse the end of the output; returns the remaining deltas."""


class TextUpTo:
    """Text up to the first of some markers, in time linear in its length: no piece is searched or copied twice."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = [marker for marker in markers if marker]
        self._keep = max(map(len, self._markers), default=1) - 1
        self._pieces: list[str] = []
        self._tail = ""

    @property
    def text(self) -> str:
        """The text so far, without the marker."""
        return "".join((*self._pieces, self._tail))

    def feed(self, text: str) -> tuple[str, str] | None:
        """Add text; once a marker has come, the marker and the text behind it."""
        text = self._tail + text
        place, marker = earliest(text, self._markers)
        end = place if marker else max(len(text) - self._keep, 0)
        self._pieces.append(text[:end])
        self._tail = "" if marker else text[end:]
        return (marker, text[end + len(marker) :]) if marker else None


def earliest(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The index of the first marker found, and the marker; -1 and an empty string if there is none."""
    found = [(text.find(marker), marker) for marker in markers]
    return min(((place, marker) for place, marker in found if place >= 0), default=(-1, ""))


def overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
