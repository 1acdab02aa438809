"""Types of arguments by their JSON schema, and the conversion of bare text, without quotes, to a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zmqengine_http.tool_calls.lenient_json import Malformed, read_whole

Schema = Mapping[str, object]
REFERENCES_MAX = 16
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def convert_text(text: str, kinds: frozenset[str]) -> object:
    """Convert a text to a value of one of these types; a string if in doubt."""
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        value = read_whole(text)
    except Malformed:
        return text
    return value if kinds or isinstance(value, (dict, list)) else text


def without_padding(text: str, *, always: bool = False) -> str:
    """A text without the line breaks that belong to the tags around it.

    At most one is removed at either end; at the end only if there was one at the start, or if `always`.
    """
    inner = text.removeprefix("\n")
    return inner.removesuffix("\n") if always or len(inner) < len(text) else text


def argument_types(parameters: Schema, key: str, told: str | None = None) -> frozenset[str]:
    """The types that an argument may have by its schema, and by `told`, the type stated in its tag.

    A tag states the name of a type, or `true` for a string and `false` for any other.
    """
    kinds = types_of(property_of(parameters, key), parameters)
    if told is None:
        return kinds
    return frozenset({"string"}) if told in ("true", "string") else (kinds - {"string"}) or frozenset({"any"})


def property_of(parameters: Schema, key: str) -> object:
    """The schema of one argument, or None."""
    properties = resolved(parameters, parameters).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """The types that a schema names, or those of its enumerated values; empty if any type is allowed."""
    kinds: set[str] = set()
    for part in alternatives(schema, root):
        kind = part.get("type")
        if isinstance(kind, str):
            kinds.add(kind)
        elif isinstance(kind, list):
            kinds |= {str(each) for each in kind}
        else:
            kinds |= {_KINDS[type(value)] for value in values_of(part) or () if type(value) in _KINDS}
    return frozenset(kinds)


def values_of(schema: Schema) -> list[object] | None:
    """The values that `const` or `enum` allow; None without either."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def alternatives(schema: object, root: Schema, depth: int = REFERENCES_MAX) -> Iterator[Schema]:
    """The alternatives of `anyOf` and `oneOf`, references resolved; without these the schema itself."""
    if not isinstance(schema, Mapping) or not depth:
        return
    schema = resolved(schema, root)
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list):
            for choice in choices:
                yield from alternatives(choice, root, depth - 1)
            return
    yield schema


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema with its reference within `root` resolved, and an `allOf` of one schema merged."""
    for _ in range(REFERENCES_MAX):
        parts = schema.get("allOf")
        reference = schema.get("$ref")
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            schema = {**parts[0], **{name: value for name, value in schema.items() if name != "allOf"}}
        elif isinstance(reference, str):
            found = _at(root, reference)
            if found is None:
                return schema
            schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
        else:
            break
    return schema


def _at(root: Schema, reference: str) -> Schema | None:
    if not reference.startswith("#"):
        return None
    found: object = root
    for step in reference[1:].strip("/").split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
