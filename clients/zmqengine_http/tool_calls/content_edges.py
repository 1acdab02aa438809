"""What stands at the edges of the content and is no part of it."""

from __future__ import annotations


class ContentEdges:
    """Knows where the content begins, and what of it is only the space around calls.

    `think_end` ends the reasoning. Models that were told not to reason begin with it, and so do those that reason
    without the marker that starts it.
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
