"""The output of splitters, and their protocol."""

from __future__ import annotations

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
    """An incremental parser of one output: `feed` text as it comes, then `finish`. Deltas come in order."""

    saw_call: bool

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""

    def feed(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that are certain."""

    def finish(self) -> list[Delta]:
        """Parse the end of the output; returns the remaining deltas."""


def overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
