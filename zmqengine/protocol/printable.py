"""Text of strangers, made fit for a log line or an error message."""

from __future__ import annotations

REASON_CHARS_MAX = 300


def printable(text: str, chars_max: int = REASON_CHARS_MAX) -> str:
    """`text` on one line, at most `chars_max` characters long, without anything that a terminal would act on.

    Line ends, control characters, NUL and lone surrogates come as Python's backslash escapes.
    """
    if len(text) <= chars_max and text.isprintable():
        return text
    # What lies far beyond the end is not looked at: the text may be megabytes long.
    shown = "".join(map(_escaped, text[:chars_max]))
    if len(text) <= chars_max and len(shown) <= chars_max:
        return shown
    return shown[: chars_max - 3] + "..."


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
