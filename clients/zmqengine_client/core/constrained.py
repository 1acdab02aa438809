"""Output constraints (`schema`, `regex`, `choice`, `grammar`), and the object parsed from a constrained output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from zmqengine.errors import GenerationFailed
from zmqengine.protocol.messages import Constraint
from zmqengine_client.core.chunks import Completion

WAYS = ("schema", "regex", "choice", "grammar", "constraint")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "default", "enum", "examples")


def take_constraint(given: dict[str, object]) -> Constraint | None:
    """Remove the constraint options from `given` and return the constraint. Raises TypeError for more than one."""
    asked = {way: value for way in WAYS if (value := given.pop(way, None)) is not None}
    if len(asked) > 1:
        raise TypeError(f"{' and '.join(asked)} were given together: an output can follow only one of them")
    for way, value in asked.items():
        return _constraint(way, value)
    return None


def json_schema(shape: object) -> dict[str, Any]:
    """The JSON schema of a type, or the schema itself. Raises TypeError for a type without one.

    A type is a pydantic model or adapter, a dataclass, a `msgspec.Struct`, or any other that msgspec can decode.
    `additionalProperties` defaults to false: a model would add members without end.
    """
    if isinstance(shape, dict):
        return shape
    for maker in ("model_json_schema", "json_schema"):
        make = getattr(shape, maker, None)
        if callable(make):
            return dict(_closed(make()))
    try:
        return dict(_closed(msgspec.json.schema(shape)))
    except TypeError as error:
        raise TypeError(f"schema: a JSON schema, or a type that has one: {error}") from None


def to_object(completion: Completion, shape: object) -> Any:
    """A complete output decoded as the type `shape`, or as dicts and lists for a plain schema.

    Raises `GenerationFailed` for an output that was cut, and the type's own error if it demands more than its schema.
    """
    if completion.finish != "stop" or completion.stop_string is not None:
        why = "at max_tokens: raise it" if completion.finish == "length" else "before its end"
        error = GenerationFailed(f"the output is not a complete object: it was cut {why}")
        error.completion = completion
        raise error
    for reader in ("model_validate_json", "validate_json"):
        read = getattr(shape, reader, None)
        if callable(read):
            return read(completion.text)
    kind: Any = Any if shape is None or isinstance(shape, dict) else shape
    return msgspec.json.decode(completion.text, type=kind)


def _constraint(way: str, value: object) -> Constraint:
    match way, value:
        case "schema", _:
            return Constraint("json_schema", json.dumps(json_schema(value), ensure_ascii=False))
        case "regex", str():
            return Constraint("regex", value)
        case "grammar", str():
            return Constraint("lark", value)
        case "choice", Sequence() if not isinstance(value, str | bytes):
            return Constraint("choice", choices=list(value))
        case "constraint", Constraint():
            return value
    wanted = {"choice": "a list of texts", "constraint": "a Constraint"}.get(way, "a text")
    raise TypeError(f"{way} is {wanted}, not {type(value).__name__}")


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed_member(key, value) for key, value in schema.items()}
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_member(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS_OF_SCHEMAS:
        return {name: _closed(schema) for name, schema in value.items()}
    return _closed(value)
