"""Parameters of tools in the shapes that agents and frameworks send: nested, optional, open and closed."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: str = "", *, closed: bool = False, **members: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": members, "required": required.split()}
    return {**schema, "additionalProperties": False} if closed else schema


def _text(**bounds: Any) -> Schema:
    return {"type": "string", "description": "What to use.", **bounds}


def _list(items: Any, **bounds: Any) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": 2000, "default": 20}
FLAG: Schema = {"type": "boolean", "default": False}
NUMBER: Schema = {"type": "number"}

TOOLS: dict[str, Schema] = {
    "read a file": _object("path", path=_text(), offset=WHOLE, limit=COUNT),
    "write a file": _object("path content", closed=True, path=_text(), content=_text()),
    "edit": _object("path old new", closed=True, path=_text(), old=_text(), new=_text(), replace_all=FLAG),
    "many edits": _object(
        "path edits",
        path=_text(),
        edits=_list(_object("old new", old=_text(), new=_text(), all=FLAG), minItems=1, maxItems=4),
    ),
    "shell": _object("command", command=_text(minLength=1), timeout_ms={"type": "number", "maximum": 600000}),
    "shell of words": _object("command", closed=True, command=_list({"type": "string"}), workdir=_text()),
    "grep": _object(
        "pattern",
        **{"-i": FLAG, "-A": COUNT, "-n": FLAG},  # type: ignore[arg-type]
        pattern=_text(),
        mode={"enum": ["content", "files_with_matches", "count"]},
    ),
    "glob": _object("pattern", closed=True, pattern=_text(), path=_text()),
    "list": _object(path=_text(), ignore=_list({"type": "string"}, maxItems=3)),
    "todo": _object(
        "todos",
        todos=_list(
            _object(
                "content status id",
                content=_text(minLength=1),
                status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
                id=_text(maxLength=8),
            ),
            maxItems=4,
        ),
    ),
    "plan": _object(
        "plan",
        closed=True,
        explanation=_text(),
        plan=_list(_object("step status", closed=True, step=_text(), status={"enum": ["todo", "done"]})),
    ),
    "fetch": _object("url prompt", url=_text(format="uri"), prompt=_text()),
    "search": _object("query", query=_text(minLength=2), allowed_domains=_list({"type": "string"})),
    "weather": _object("city", city=_text(), unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    "weather, strict": _object(
        "city unit", closed=True, city=_text(), unit={"type": ["string", "null"], "enum": ["c", None]}
    ),
    "no parameters": {"type": "object", "properties": {}},
    "no parameters, closed": {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "required": [],
    },
    "calendar": _object(
        "title start",
        title=_text(),
        start=_text(format="date-time"),
        day=_text(format="date"),
        guests=_list(_text(format="email")),
    ),
    "alarm": _object(
        "at", closed=True, at=_text(format="time"), days=_list({"enum": ["mon", "tue"]}, maxItems=2)
    ),
    "mail": _object(
        "to subject", to=_list(_text(format="email"), minItems=1, maxItems=2), subject=_text(maxLength=40)
    ),
    "ticket": _object(
        "id", closed=True, id=_text(pattern="^[A-Z]{2,5}-[0-9]+$"), priority={"enum": [1, 2, 3]}
    ),
    "account": _object(
        "id", id=_text(format="uuid"), balance={"type": "number", "minimum": 0, "exclusiveMaximum": 1000}
    ),
    "order": {
        **_object("items", closed=True, items=_list({"$ref": "#/$defs/item"}, minItems=1, maxItems=3)),
        "$defs": {"item": _object("sku quantity", closed=True, sku=_text(maxLength=8), quantity=COUNT)},
    },
    "order, draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_object("item", item={"$ref": "#/definitions/item"}),
        "definitions": {"item": _object("sku", sku=_text())},
    },
    "tree": {
        "$defs": {
            "node": _object(
                "name",
                closed=True,
                name=_text(maxLength=4),
                children=_list({"$ref": "#/$defs/node"}, maxItems=2),
            )
        },
        "$ref": "#/$defs/node",
    },
    "optional members": {
        **_object("a", a=_or_null(_text()), b=_or_null(WHOLE), c=_or_null(_list(NUMBER))),
        "title": "Args",
    },
    "tagged": _object(
        "shape",
        shape={
            "oneOf": [
                _object("kind r", closed=True, kind={"const": "circle"}, r=NUMBER),
                _object("kind w h", closed=True, kind={"const": "box"}, w=NUMBER, h=NUMBER),
            ],
            "discriminator": {"propertyName": "kind"},
        },
    ),
    "either": _object("value", value={"anyOf": [_text(), NUMBER, FLAG, _list(_text())]}),
    "headers": _object(
        "url", url=_text(), headers={"type": "object", "additionalProperties": {"type": "string"}}
    ),
    "labels": _object(
        "labels",
        labels={
            "type": "object",
            "patternProperties": {"^[a-z]{1,6}$": _text()},
            "additionalProperties": False,
        },
    ),
    "point": _object(
        "at", at={"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2}
    ),
    "sql": _object(
        "query", query=_text(), limit={"type": ["integer", "null"], "minimum": 0}, dialect={"const": "sqlite"}
    ),
    "extraction": _object(
        "people",
        closed=True,
        people=_list(
            _object(
                "name age", closed=True, name=_text(), age={"type": "integer", "minimum": 0, "maximum": 150}
            )
        ),
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "anything": _object("arguments", name=_text(), arguments={"type": "object"}),
    "click": _object(
        "x y",
        closed=True,
        x=WHOLE,
        y=WHOLE,
        button={"enum": ["left", "right"]},
        modifiers=_list({"enum": ["ctrl"]}),
    ),
    "split the bill": _object(
        "cents", cents={"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 100000}
    ),
}
