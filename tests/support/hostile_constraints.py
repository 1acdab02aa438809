"""Constraints by somebody who means harm, or who does not know what they cost."""

from __future__ import annotations

import json
from typing import Any

from zmqengine.engine.grammar.grammar import Kind


def _objects(count: int) -> dict[str, Any]:
    """A choice of `count` objects."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"kind{n}": {"const": n}, "text": {"type": "string"}},
                "required": [f"kind{n}", "text"],
                "additionalProperties": False,
            }
            for n in range(count)
        ]
    }


def _chain(count: int, each: str) -> dict[str, Any]:
    """`count` definitions, each of which holds the next one twice."""
    defs: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in ("a", "b")},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for n in range(count)
    }
    defs[f"d{count}"] = {"const": each}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _nested(levels: int, items: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"const": "abc"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": items, "maxItems": items}
    return schema


def _doubling(levels: int, first: str) -> str:
    rules = [f"a{n}: a{n - 1} a{n - 1}" for n in range(1, levels + 1)]
    return "\n".join([f"start: a{levels}", f"a0: {first}", *rules])


REGEX = (
    "(a{1000}){1000}",
    "[a-z]{3}(a{1000}){1000}",
    "((ab){300}c{300}){300}",
    "(((a{50}){50}){50}){50}",
    "(a?){1000}a{1000}",
    "((a|aa)*)*b",
    "((a|b)*a(a|b){60}){20}c",
    ".*a.{500}",
    "(.*a){60}",
    "(.{0,100}x){100}",
    r"(?s:.*)(?:a.{40}b)(?s:.*)c",
    r"((\p{L}|\p{N}){1,500} ){1,500}",
    r"(\p{L}{1,40}\s){0,2000}",
    "(?i)" + "abcdefghij" * 2000,
    "(" + "|".join(f"x{n}y{{0,50}}" for n in range(3000)) + ")",
    "(dog|cat).{10,400}(home|happy)",
    "(a|b|ab|ba|aba)*c?" * 60,
    "[^x]*(a|b).{2000}y",
    "(" * 500 + "a" + ")*" * 500,
    r"[^\s\S]",
    r"a[^\s\S]",
    r"(\w+\s?){1,5000}",
    "(?s:.{0,5000}).{0,5000}",
    "." * 60_000,
)
LARK = (
    'start: s\ns: s s s | s s | "a" | "b" | "ab"',
    'start: e\ne: e op e | "(" e ")" | /[0-9]+/\nop: "+" | "-" | "*" | ""',
    "start: start start | start",
    'start: a\na: a a | b\nb: b b | a | "x"',
    'start: x+\nx: x* y*\ny: "a"* | x',
    _doubling(40, '"ab"'),
    _doubling(40, "/[ab]/"),
    _doubling(12, '("a" | "aa")'),
    "start: " + " ".join(["(/a*/ | /b*/)"] * 400),
    "start: (" + " | ".join(f'r{n} "x"' for n in range(800)) + ")\n" + "\n".join(f'r{n}: "a" "b"*' for n in range(800)),
    'start: "' + '\\"' * 30_000,
    "start: /" + "a" * 60_000,
    "/" * 60_000,
    "#" * 60_000,
    "start: %json" + " " * 60_000,
    "start: " + "%json {} " * 5_000,
    'start: %json ["' * 4_000,
    "start: " + "(" * 20_000,
    'start: "a"{100000}',
    'start: ("ab"{1000}){1000}',
    'start: "a" /[^\\s\\S]/',
    'start: %llguidance {"no_forcing": false}\n',
    '%llguidance {"no_forcing": false}\nstart: /(a{1000}){1000}/',
    'start: @answer @answer | "a"',
    "start: A\nA: " + " & ".join(f"/(?s:.*){letter}.{{20}}/" for letter in "abcdefgh"),
    "start: A\nA: ~/(?s:.*)a.{40}/",
    'start: A\nA: %regex {"substring_chars": "' + "the quick brown fox " * 2500 + '"}',
    'start: p::0x0\np::_: "a" p::incr([0:32]) %if lt([0:32],4000000000)\n | ""',
    '%llguidance {"step_max_items": 100000000}\nstart: s\ns: s s | s s s | "a"',
    "start: r0\n" + "\n".join(f'r{n}: r{n + 1} r{n + 1} | ""' for n in range(60)) + '\nr60: "a" | ""',
    'start: ' + '"a" ' * 15_000,
)  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "repetitions": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "long pattern": {"type": "string", "pattern": "(dog|cat|boy|girl) .{0,60}(home|happy)", "maxLength": 60_000},
    "long text": {"type": "string", "minLength": 500_000},
    "many items": {"type": "array", "items": {"const": "abc"}, "minItems": 1_000_000},
    "nested lists": _nested(4, 100),
    "deep lists": _nested(60, 2),
    "doubled references": _chain(24, "abc"),
    "long chain": _chain(400, ""),
    "many objects": _objects(3000),
    "many members": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "long name": {"type": "object", "properties": {"a" * 800: {"type": "string"}, "b": {"$ref": "#"}}},
    "long enum": {"enum": ["x" * n for n in range(300)]},
    "long const": {"const": "a" * 60_000},
    "root in a circle": {"$ref": "#"},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "circle of alternatives": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}},
    "alternatives of themselves": {
        "$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 30}},
    },
    "endless list": {
        "type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"], "additionalProperties": False,
    },
    "chain of allOf": {
        "$ref": "#/$defs/r0",
        "$defs": {f"r{n}": {"allOf": [{"$ref": f"#/$defs/r{n + 1}"}]} for n in range(800)}
        | {"r800": {"type": "null"}},
    },
    "impossible member": {
        "type": "object", "properties": {"t": {"type": "string", "pattern": r"[^\s\S]"}}, "required": ["t"],
    },
    "fine multiples": {"type": "number", "multipleOf": 0.0000001, "minimum": 0, "maximum": 1e30},
    "many patterns": {"anyOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(100)]},
    "separators": {
        "type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ".*a.{500}"},
    },
    "twins": {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}", "title": title} for title in "ab"]} for n in range(40)
        } | {"d40": {"type": "integer"}},
    },
    "long prefix": {"type": "array", "prefixItems": [{"type": "string"}] * 3000, "minItems": 3000},
}  # fmt: skip
CHOICES = (
    ["a" * 60_000],
    [f"choice {n}" for n in range(4000)],
    ["a" * n for n in range(1, 350)],
    [chr(0x10000 + n) for n in range(5000)],
)

OVER_A_LIMIT_PATTERN = "(.*[aeiou].{12}){30}"
"""Compiles, and meets a limit of llguidance's lexer after 40 to 80 tokens of the bundled model."""

HOSTILE: dict[str, tuple[Kind, str, list[str]]] = (
    {f"regex {text[:40]}": ("regex", text, []) for text in REGEX}
    | {f"lark {text[:40]}": ("lark", text, []) for text in LARK}
    | {f"deep {n}": ("json_schema", '{"items":' * n + "{}" + "}" * n, []) for n in (200, 5_000)}
    | {f"schema {name}": ("json_schema", json.dumps(schema), []) for name, schema in SCHEMAS.items()}
    | {f"choices {n}": ("choice", "", choices) for n, choices in enumerate(CHOICES)}
)
