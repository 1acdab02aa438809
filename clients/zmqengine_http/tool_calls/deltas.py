"""What a splitter gives, and what all splitters have in common."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "call_start", "call_text", "call_end"]


class Delta(NamedTuple):
    """A piece of the answer: text of the content or the reasoning, or a call with `name` and its JSON in `text`.

    A call that is told while it is written is a `call_start` with its name, its JSON in pieces of
    `call_text`, and a `call_end`, which does not come if the output ends within it.
    """

    kind: Kind
    text: str
    name: str = ""


class TextSplitter(Protocol):
    """`feed` it the text of one answer as it comes, then `finish`. Both give deltas in order."""

    saw_call: bool

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning, as far as can be told."""

    def feed(self, text: str) -> list[Delta]:
        """What can be told of the answer after this text."""

    def finish(self) -> list[Delta]:
        """What is left at the end of the output."""


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
