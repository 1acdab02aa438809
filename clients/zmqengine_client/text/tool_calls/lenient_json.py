"""A lenient JSON parser, for what models write when they mean JSON.

It accepts JSON, and single-quoted strings, bare keys, True/False/None, trailing commas, raw line breaks and unknown
escapes in strings, and the `<|"|>` quotes of Gemma 4. It never guesses: truncated or other text is `Malformed`.
"""

from __future__ import annotations

import json
import re

DEPTH_MAX = 64
_BARE = re.compile(r"[A-Za-z_$][\w$.-]*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_SPACE = re.compile(r"\s*")
GEMMA_QUOTE = '<|"|>'
CONSTANTS: dict[str, object] = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", '"': '"', "'": "'", "/": "/", "\\": "\\",
}  # fmt: skip


class Malformed(ValueError):
    """The text is not a value, or not a call, of the format."""


def read_value(text: str, start: int = 0) -> tuple[object, int]:
    """The value that begins at `start`, and the index after it. Raises `Malformed`."""
    return _Reader(text).value(start, DEPTH_MAX)


def read_whole(text: str) -> object:
    """The value of a whole text, ignoring surrounding white space. Raises `Malformed`."""
    value, end = read_value(text)
    if text[end:].strip():
        raise Malformed(f"text after the value at {end}")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, at: int, depth: int) -> tuple[object, int]:
        at = self._skip(at)
        if depth == 0:
            raise Malformed("nested too deep")
        if self._text.startswith(GEMMA_QUOTE, at):
            return self._between(at, GEMMA_QUOTE)
        first = self._text[at : at + 1]
        if first == "{":
            return self._object(at + 1, depth)
        if first == "[":
            return self._array(at + 1, depth)
        if first in ('"', "'") and first:
            return self._string(at)
        number = NUMBER.match(self._text, at)
        if number:
            return to_number(number[0]), number.end()
        word = _BARE.match(self._text, at)
        if word and word[0] in CONSTANTS:
            return CONSTANTS[word[0]], word.end()
        raise Malformed(f"no value at {at}")

    def _object(self, at: int, depth: int) -> tuple[dict[str, object], int]:
        result: dict[str, object] = {}
        while True:
            at = self._skip(at)
            if self._text.startswith("}", at):
                return result, at + 1
            key, at = self._key(at)
            at = self._expect(at, ":")
            result[key], at = self.value(at, depth - 1)
            at = self._after_item(at, "}")

    def _array(self, at: int, depth: int) -> tuple[list[object], int]:
        result: list[object] = []
        while True:
            at = self._skip(at)
            if self._text.startswith("]", at):
                return result, at + 1
            item, at = self.value(at, depth - 1)
            result.append(item)
            at = self._after_item(at, "]")

    def _key(self, at: int) -> tuple[str, int]:
        if self._text.startswith(GEMMA_QUOTE, at):
            return self._between(at, GEMMA_QUOTE)
        if self._text[at : at + 1] in ('"', "'"):
            return self._string(at)
        word = _BARE.match(self._text, at)
        if not word:
            raise Malformed(f"no key at {at}")
        return word[0], word.end()

    def _between(self, at: int, quote: str) -> tuple[str, int]:
        end = self._text.find(quote, at + len(quote))
        if end < 0:
            raise Malformed("a string is not closed")
        return self._text[at + len(quote) : end], end + len(quote)

    def _string(self, at: int) -> tuple[str, int]:
        quote = self._text[at]
        match = (_DOUBLE if quote == '"' else _SINGLE).match(self._text, at)
        if not match:
            raise Malformed("a string is not closed")
        return _unescaped(match[1]), match.end()

    def _after_item(self, at: int, close: str) -> int:
        at = self._skip(at)
        if self._text.startswith(",", at):
            return at + 1
        if self._text.startswith(close, at):
            return at
        raise Malformed(f"neither , nor {close} at {at}")

    def _expect(self, at: int, character: str) -> int:
        at = self._skip(at)
        if not self._text.startswith(character, at):
            raise Malformed(f"no {character} at {at}")
        return at + 1

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match
        return match.end()


_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SINGLE = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\.", re.DOTALL)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_escaped, text) if "\\" in text else text


def _escaped(match: re.Match[str]) -> str:
    escape = match[0]
    if len(escape) > 2:
        # A JSON decoder joins surrogate pairs; a lone surrogate becomes U+FFFD.
        return str(json.loads(f'"{escape}"')).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return unescaped(escape[1])


def unescaped(character: str) -> str:
    r"""The text of a backslash and this character. An escape that JSON does not know keeps its backslash: models mean
    `\\d` where they write `\d` in a regular expression."""
    return ESCAPES.get(character, "\\" + character)


def to_number(text: str) -> int | float:
    """Convert a JSON number. Raises `Malformed` if it is out of range."""
    if len(text) > 400:
        raise Malformed("a number of more than 400 digits")
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Malformed("a number out of range")
    return value if any(mark in text for mark in ".eE") else int(text)
