"""An incremental parser of lenient JSON arguments: text in, strict JSON out, piece by piece.

It accepts what `lenient_json` accepts and writes JSON without white space. The concatenated output does not
depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from zmqengine_client.text.tool_calls.deltas import overlap
from zmqengine_client.text.tool_calls.lenient_json import (
    CONSTANTS,
    DEPTH_MAX,
    GEMMA_QUOTE,
    NUMBER,
    Malformed,
    to_number,
    unescaped,
)

_WORD = re.compile(r"[\w$.+-]+")
_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_WORD_CHARS_MAX = 500


class ArgumentsParser(Protocol):
    """An incremental parser of the arguments of one call: `feed` returns JSON.

    After the end of the arguments `done` is True and `rest` is the text after them. After malformed text
    `broken` is True, no more JSON comes, and `rest` begins with the text that could not be parsed.
    """

    done: bool
    broken: bool
    rest: str

    def feed(self, text: str) -> str:
        """Parse more text; returns the JSON it adds."""

    def finish(self) -> str:
        """Parse the end of the output; returns the JSON it adds. `done` if the arguments are whole with that."""


class JsonArguments:
    """An `ArgumentsParser` of one object, from its `{` to its `}`.

    With `keywords`, of an object or of Python arguments after the `(`: those without a keyword have the names of
    `positions`. With `arrays`, of an array too; with `optional`, of nothing
    before the `<` of a marker. `quote` is an additional string delimiter of some models.
    """

    def __init__(
        self,
        *,
        keywords: bool = False,
        positions: Sequence[str] = (),
        arrays: bool = False,
        optional: bool = False,
        quote: str = GEMMA_QUOTE,
    ) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._open: list[str] = ["("] if keywords else []
        self._begun = not (keywords or optional)
        self._keywords = keywords
        self._positions = deque(positions)
        self._own_quote = quote
        self._arrays = arrays
        self._quote = ""
        self._in_key = False
        self._comma = False
        # The expected lexeme: value, key, colon, or after (a comma or a closing bracket).
        self._awaited = "key" if keywords else "value"

    def feed(self, text: str) -> str:
        """Parse more text; returns the JSON it adds."""
        self.rest += text
        pieces = []
        if not self._begun and (first := self.rest.lstrip()[:1]):
            self._begun = True
            if first == "{":
                self._open, self._awaited = [], "value"
            elif self._keywords:
                pieces.append("{")
            else:
                self.done = True
                return "{}"
        if not self._begun:
            return ""
        try:
            while self.rest and not self.done:
                piece = self._in_string() if self._quote else self._next()
                if piece is None:
                    break
                pieces.append(piece)
        except Malformed:
            self.broken = True
        return "".join(pieces)

    def finish(self) -> str:
        """Parse the end of the output: JSON that is not closed is cut."""
        return ""

    def _next(self) -> str | None:
        """Parse one lexeme; None if it may continue in the next text."""
        self.rest = self.rest.lstrip()
        if not self.rest:
            return ""
        first = self.rest[0]
        if first in "}])":
            return self._close(first)
        if self._awaited == "colon":
            self._take("=" if self._open[-1] == "(" else ":", first)
            self._awaited = "value"
            return ":"
        if self._awaited == "after":
            self._take(",", first)
            self._comma = True
            self._awaited = "value" if self._open[-1] == "[" else "key"
            return ""
        if self._awaited == "key" and self._open[-1] == "(":
            positional = self._is_positional(first)
            if positional is None:
                return None
            if positional:
                return self._position()
        if first in "{[" and self._awaited == "value":
            return self._begin(first)
        quote = first if first in "\"'" else self._own_quote
        if self._keywords and first in "\"'":
            if len(self.rest) < 3 and first * len(self.rest) == self.rest:
                return None
            quote = first * 3 if self.rest.startswith(first * 3) else first
        if self.rest.startswith(quote):
            return self._begin_string(quote)
        if quote.startswith(self.rest):
            return None
        return self._word()

    def _is_positional(self, first: str) -> bool | None:
        """Whether an argument of a Python call has no keyword; None if that depends on the text to come."""
        if first in "\"'{[":
            return True
        word = _WORD.match(self.rest)
        if word is None:
            return False
        behind = self.rest[word.end() :].lstrip()
        if not behind and len(self.rest) <= _WORD_CHARS_MAX:
            return None
        return bool(behind) and not behind.startswith("=")

    def _position(self) -> str:
        if not self._positions:
            raise Malformed("no name for an argument")
        self._awaited = "value"
        return f'{self._separator()}"{escaped(self._positions.popleft())}":'

    def _take(self, wanted: str, first: str) -> None:
        if first != wanted:
            raise Malformed(f"no {wanted}")
        self.rest = self.rest[1:]

    def _separator(self) -> str:
        comma, self._comma = self._comma, False
        return "," if comma else ""

    def _begin(self, first: str) -> str:
        if not self._open and first != "{" and not self._arrays:
            raise Malformed("arguments are an object")
        if len(self._open) == DEPTH_MAX:
            raise Malformed("nested too deep")
        self.rest = self.rest[1:]
        separator = self._separator()
        self._open.append(first)
        self._awaited = "key" if first == "{" else "value"
        return separator + first

    def _close(self, first: str) -> str:
        fits = self._open and self._open[-1] == {"}": "{", "]": "[", ")": "("}[first]
        starved = self._awaited == "colon" or (self._awaited == "value" and self._open[-1:] != ["["])
        if not fits or starved:
            raise Malformed(f"no place for {first}")
        self.rest = self.rest[1:]
        self._comma = False
        self._open.pop()
        self._awaited = "after"
        self.done = not self._open
        return "}" if first == ")" else first

    def _begin_string(self, quote: str) -> str:
        if not self._open:
            raise Malformed("arguments are an object")
        self.rest = self.rest[len(quote) :]
        self._quote = quote
        self._in_key = self._awaited == "key"
        return self._separator() + '"'

    def _in_string(self) -> str | None:
        quote = self._quote
        end = self.rest.find(quote)
        escape = self.rest.find("\\") if quote != self._own_quote else -1
        if escape >= 0 and (end < 0 or escape < end):
            return self._before(escape) if escape else self._escape()
        if end > 0:
            return self._before(end)
        if end == 0:
            self.rest = self.rest[len(quote) :]
            self._quote = ""
            self._awaited = "colon" if self._in_key else "after"
            return '"'
        whole = len(self.rest) - overlap(self.rest, quote)
        return self._before(whole) if whole else None

    def _before(self, end: int) -> str:
        text, self.rest = self.rest[:end], self.rest[end:]
        return escaped(text)

    def _escape(self) -> str | None:
        if len(self.rest) < 2 or (self.rest[1] == "u" and _may_become_unicode(self.rest)):
            return None
        found = _UNICODE.match(self.rest)
        if not found:
            character = self.rest[1]
            self.rest = self.rest[2:]
            return escaped(unescaped(character))
        code, self.rest = int(found[1], 16), self.rest[6:]
        if not 0xD800 <= code < 0xE000:
            return escaped(chr(code))
        low = _UNICODE.match(self.rest)
        if code < 0xDC00 and low and 0xDC00 <= int(low[1], 16) < 0xE000:
            self.rest = self.rest[6:]
            return escaped(chr(0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)))
        return "\ufffd"

    def _word(self) -> str | None:
        """Parse a bare key, a constant or a number; None until the character after it is known."""
        found = _WORD.match(self.rest)
        if not found or not self._open or len(found[0]) > _WORD_CHARS_MAX:
            raise Malformed("no value")
        word = found[0]
        if found.end() == len(self.rest):
            return None
        if self._awaited == "key":
            if not _KEY.fullmatch(word):
                raise Malformed("no key")
            if self._open[-1] == "(" and word in self._positions:
                self._positions.remove(word)
            written, self._awaited = f'"{escaped(word)}"', "colon"
        elif word in CONSTANTS:
            written, self._awaited = json.dumps(CONSTANTS[word]), "after"
        elif NUMBER.fullmatch(word):
            written, self._awaited = json.dumps(to_number(word)), "after"
        else:
            raise Malformed("no value")
        self.rest = self.rest[found.end() :]
        return self._separator() + written


def escaped(text: str) -> str:
    """The text escaped for a JSON string, without quotes."""
    clean = text.encode("utf-8", "replace").decode() if not text.isascii() else text
    return msgspec.json.encode(clean).decode()[1:-1]


def _may_become_unicode(text: str) -> bool:
    r"""Whether a text that begins with `\u` may continue to a complete escape, or to a surrogate pair."""
    if len(text) < 6:
        return all(character in "0123456789abcdefABCDEF" for character in text[2:])
    high = _UNICODE.match(text)
    if not high or not 0xD800 <= int(high[1], 16) < 0xDC00 or len(text) >= 12:
        return False
    return "\\u".startswith(text[6:8]) and all(c in "0123456789abcdefABCDEF" for c in text[8:])
