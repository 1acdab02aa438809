"""Keywords of JSON Schema that a grammar does not enforce, unless `strict`; docs/constraints.md lists
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Schema = Mapping[str, object]

UNENFORCED = frozenset(
    (
        "$dynamicAnchor", "$dynamicRef", "contains", "contentEncoding", "contentMediaType", "contentSchema",
        "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    )
)  # fmt: skip
FORMATS = frozenset(
    (
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
    )
)  # fmt: skip
"""String formats that are enforced."""

_OF_NUMBERS = ("const", "enum", "multipleOf")
_TOO_LARGE = 10**300

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "default", "enum", "examples", "required", "x-guidance")


def unenforced_keywords(schema: object) -> frozenset[str]:
    """The keywords in a schema and its subschemas that its grammar will not enforce."""
    return frozenset(keyword for part in _parts(schema) for keyword in _of_part(part))


def _parts(schema: object) -> Iterator[Schema]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, Mapping):
            continue
        yield part
        for keyword, value in part.items():
            if keyword in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                waiting += value.values()
            elif keyword not in _VALUES:
                waiting.append(value)


def _of_part(part: Schema) -> Iterator[str]:
    yield from UNENFORCED & part.keys()
    given = part.get("format")
    if isinstance(given, str) and given not in FORMATS and part.get("type", "string") == "string":
        yield f"format: {given}"
    reference = part.get("$ref")
    if isinstance(reference, str) and "//json-schema.org/" in reference:
        # llguidance knows the meta-schema, but skips some of its keywords.
        yield "$ref"
    yield from (key for key in _OF_NUMBERS if key in part and _inexact(part[key]))
    required, properties = part.get("required"), part.get("properties")
    names = set(map(str, required)) if isinstance(required, list) else set()
    least, most = part.get("minProperties"), part.get("maxProperties")
    if isinstance(least, int) and least > len(names) + 1:
        yield "minProperties"
    if isinstance(most, int) and not (isinstance(properties, Mapping) and set(properties) <= names):
        yield "maxProperties"
    choices = part.get("oneOf")
    if isinstance(choices, list) and not _exclude_each_other(choices):
        yield "oneOf"


def _inexact(value: object) -> bool:
    """Whether a value holds an integer that a grammar would round to 53 bits."""
    if isinstance(value, list):
        return any(map(_inexact, value))
    if isinstance(value, Mapping):
        return any(map(_inexact, value.values()))
    return isinstance(value, int) and (abs(value) >= _TOO_LARGE or int(float(value)) != value)


def _exclude_each_other(choices: list[object]) -> bool:
    """Whether the alternatives' types, or a constant tag of each, show that no value matches two of them."""
    kinds = [_kinds(choice) for choice in choices]
    if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return True
    tags = [_tags(choice) for choice in choices]
    shared = set(tags[0]).intersection(*tags[1:]) if tags else set()
    return any(len({str(tag[name]) for tag in tags}) == len(tags) for name in shared)


def _kinds(schema: object) -> frozenset[str]:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    return frozenset((kind,)) if isinstance(kind, str) else frozenset()


def _tags(schema: object) -> dict[str, object]:
    """The required members that a schema restricts to one value each."""
    if not isinstance(schema, Mapping):
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    names = {name for name in required if isinstance(name, str)}
    return {
        name: value["const"]
        for name, value in properties.items()
        if name in names and isinstance(value, Mapping) and "const" in value
    }
