"""Text of strangers, made fit for a log line or an error message."""

from __future__ import annotations

from collections.abc import Mapping

REASON_CHARS_MAX = 300
FIELD_CHARS_MAX = 1000
"""Maximum characters of one field of a log line, and of one line of a traceback: they may hold input of clients."""
LIST_ITEMS_MAX = 32
"""Maximum items of a list in a field."""
FIELDS_CHARS_MAX = 16_384
"""Maximum characters of the values of one log line."""
TRACE_LINES_MAX = 100
"""Maximum lines of a traceback: the last ones, which name the failure."""


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


def printable_fields(fields: Mapping[str, object], chars_max: int = FIELD_CHARS_MAX) -> dict[str, object]:
    """The fields of one log line, bounded each and together; what is beyond the bound is "..."."""
    shown: dict[str, object] = {}
    room = FIELDS_CHARS_MAX
    for name, value in fields.items():
        each = _shown(value, chars_max)
        size = len(str(each))
        shown[printable(name, FIELD_CHARS_MAX)] = each if size <= room else "..."
        room -= min(room, size)
    return shown


def printable_trace(text: str) -> list[str]:
    """The last lines of a traceback, each printable and bounded."""
    return [printable(line, FIELD_CHARS_MAX) for line in text.splitlines()[-TRACE_LINES_MAX:]]


def _shown(value: object, chars_max: int) -> object:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return [_shown(item, chars_max) for item in value[:LIST_ITEMS_MAX]]
    return printable(str(value), chars_max)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
