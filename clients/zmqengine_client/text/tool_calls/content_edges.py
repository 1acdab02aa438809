"""Places in the content of an output: where it begins, where calls stand in it, and where its lines begin."""

from __future__ import annotations

LEADING_CHARS_MAX = 256
"""White space before a leading end of reasoning, at most."""


class ContentEdges:
    """Tracks where the content begins, and drops white space around calls.

    `think_end` is the marker that ends reasoning. An output may begin with it: if reasoning is turned off, or
    if the model reasons without a start marker.
    """

    def __init__(self, think_end: str) -> None:
        self._think_end = think_end
        self._begun = False
        self._behind_call = False
        self._space: list[str] = []

    @property
    def at_start(self) -> bool:
        """Whether no content but white space has come, or none since a call."""
        return not self._begun or self._behind_call

    def after_leading_end(self, held: str) -> str | None:
        """The text after a leading `think_end`; None if the content does not begin with it."""
        if self._begun or not self._think_end:
            return None
        text = held.lstrip()
        if not text.startswith(self._think_end):
            return None
        self._begun = True
        return text[len(self._think_end) :]

    def may_become_leading_end(self, held: str) -> bool:
        """Whether the held text is a prefix of a leading `think_end`."""
        if self._begun or not self._think_end or len(held) > LEADING_CHARS_MAX:
            return False
        return self._think_end.startswith(held.lstrip())

    def after_call(self) -> None:
        """Note the end of a call."""
        self._behind_call, self._space = True, []

    def content(self, text: str) -> str:
        """The content in a text; white space after a call is held back until more content follows."""
        if not text:
            return ""
        self._begun = self._begun or bool(text.strip())
        if not self._behind_call:
            return text
        if not text.strip():
            self._space.append(text)
            return ""
        text, self._space, self._behind_call = "".join((*self._space, text)), [], False
        return text


class LineStarts:
    """Tracks whether content is at the start of a line where a call may begin: not within a fence of code."""

    def __init__(self) -> None:
        self.at_start = True
        self._line = ""
        self._fenced = False

    def pass_over(self, text: str) -> None:
        """Go over more content."""
        *ended, last = text.split("\n")
        for line in ended:
            self._fenced ^= (self._line + line[:3]).startswith("```")
            self._line = ""
        self._line = (self._line + last[:3])[:3]
        if text:
            self.at_start = text.endswith("\n") and not self._fenced
