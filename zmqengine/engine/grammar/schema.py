"""JSON schemas that llguidance enforces exactly: keywords that it does not enforce are rewritten, or refused.

Each case here was found by outputs that its grammars allow and the JSON Schema Test Suite forbids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from zmqengine.errors import BadRequest

Schema = dict[str, Any]

NOT_ENFORCED = ("contentEncoding", "contentMediaType", "contentSchema")
"""Keywords that llguidance accepts and does not enforce."""

PATTERNS_MAX = 128
"""Members of one `patternProperties`. llguidance compares each pattern with each other one before its limits hold: 128
take 0.1 s, 450 take minutes."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TOO_LARGE = 10**300
_LEAST = -(2**63) + 1024
"""The least integer of 64 bits but one that binary64 holds."""

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "default", "enum", "examples", "required", "x-guidance")

# Years from 0001 on, and 29 February in leap years only; no second 60, which depends on the day.
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_PIECE = re.compile(r"(?s)\\.?|\[\^?|\]|[^\\\[\]]+")
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def enforceable(schema: Schema) -> Schema:
    """A schema that llguidance enforces and that allows no text beyond `schema`. Raises `BadRequest` naming a
    keyword."""
    schema = {key: _member(key, value) for key, value in schema.items()}
    for keyword in NOT_ENFORCED:
        if keyword in schema:
            raise _refused(f'"{keyword}"')
    if "$ref" in schema and "$id" in schema:
        raise _refused('"$id" beside "$ref", which drafts read differently')
    required = schema.get("required")
    # llguidance counts a repeated name twice.
    if _is_number(schema.get("minProperties")) and schema["minProperties"] > 1 + len(required or ()):
        raise _refused('"minProperties" above the number of required members and one')
    _put_patterns(schema)
    _close(schema)
    return schema


def without_inexact(schema: Any, *, lenient: bool) -> Any:
    """The schema without integers that llguidance would round, as it reads numbers as binary64: 2**53 + 1 is another
    number there. Bounds become tighter. Raises `BadRequest` naming any other keyword, or skips it if `lenient`."""
    if isinstance(schema, list):
        return [without_inexact(item, lenient=lenient) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for key, value in schema.items():
        number = _inexact(value) if key in ("const", "enum", "multipleOf") else None
        if number is not None and not lenient:
            raise _refused(f'"{key}" of {number}: integers beyond 2**53 are held to 53 bits')
        if key in _BOUNDS:
            kept[key] = _tighter(key, value)
        elif number is None:
            kept[key] = _exact_member(key, value, lenient=lenient)
    return kept


def _tighter(key: str, bound: Any) -> Any:
    """A bound that binary64 holds; beyond 64 bits llguidance takes the largest and the least integer of 64 bits.

    Between the least one and another bound below zero it overflows its stack: no bound from below is as low.
    """
    upper = "aximum" in key
    if not upper and _is_number(bound) and bound < _LEAST:
        return _LEAST
    if not isinstance(bound, int) or not -(2**63) < bound < 2**63 - 1:
        return bound
    rounded = float(bound)
    if upper and rounded > bound:
        return int(math.nextafter(rounded, -math.inf))
    return int(math.nextafter(rounded, math.inf)) if not upper and rounded < bound else int(rounded)


def _exact_member(key: str, value: Any, *, lenient: bool) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {name: without_inexact(part, lenient=lenient) for name, part in value.items()}
    return without_inexact(value, lenient=lenient)


def _inexact(value: Any) -> int | None:
    """An integer in a value that binary64 cannot hold, if any."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int) and (abs(part) >= _TOO_LARGE or int(float(part)) != part):
            return part
    return None


def bound_patterns(schema: Any) -> None:
    """Raise `BadRequest` for a schema with more than `PATTERNS_MAX` patterns in one `patternProperties`."""
    if isinstance(schema, list):
        for item in schema:
            bound_patterns(item)
    elif isinstance(schema, dict):
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) > PATTERNS_MAX:
            raise BadRequest(
                f"constraint: {len(patterns)} patternProperties in one object, {PATTERNS_MAX} at most"
            )
        for value in schema.values():
            bound_patterns(value)


def other_than(names: Iterable[str]) -> str:
    """A regular expression for every text except these."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_other_than(root)}$"


def _member(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if isinstance(value, list):
        return [_member("", item) for item in value]
    if not isinstance(value, dict):
        return value
    if key in _MAPS_OF_SCHEMAS:
        return {name: _member("", schema) for name, schema in value.items()}
    return enforceable(value)


def _put_patterns(schema: Schema) -> None:
    pattern = _FORMATS.get(str(schema.get("format")))
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _without_byte_order_mark(schema["pattern"])
    if pattern is not None:
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern


def _without_byte_order_mark(pattern: str) -> str:
    """The regular expression with no byte order mark where it has no white space: it is white space in JavaScript
    alone."""
    pieces, opened = list[str](), -1
    for piece in _PIECE.findall(pattern):
        if piece in ("[", "[^") and opened < 0:
            opened = len(pieces)
        elif piece == "]":
            opened = -1
        elif piece in (r"\s", r"\S") and opened >= 0 and pieces[opened] == "[^":
            pieces[opened] = r"[^\x{FEFF}"
        pieces.append(r"[^\s\x{FEFF}]" if piece == r"\S" else piece)
    return "".join(pieces)


def _close(schema: Schema) -> None:
    """A further member may not be a named one whose name is spelled with escapes: `"\\u0061"` is `"a"`."""
    named, further = schema.get("properties"), schema.get("additionalProperties", True)
    if further is False:
        return
    if schema.get("patternProperties"):
        raise _refused('"patternProperties" without "additionalProperties": false')
    if isinstance(named, dict) and named:
        if any(character in '"\\' or character < " " for name in named for character in name):
            raise _refused(
                'names with quotes, backslashes or control characters without "additionalProperties": false'
            )
        schema["patternProperties"] = {other_than(named): further}
        schema["additionalProperties"] = False


def _other_than(node: dict[str, Any]) -> str:
    following = [character for character in node if character]
    if not following:
        return "(?s:.)+"
    others = f"[^{''.join(map(_escaped, following))}](?s:.)*"
    longer = "|".join(
        [others, *(_escaped(character) + _other_than(node[character]) for character in following)]
    )
    return f"(?:{longer})" if "" in node else f"(?:{longer})?"


def _escaped(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(what: str) -> BadRequest:
    return BadRequest(f"constraint: the schema has keywords that cannot be enforced: {what}")
