"""Arguments that are written as bare text, without quotes: what their schema makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zmqengine_http.tool_calls.lenient import Malformed, read_whole

Schema = Mapping[str, object]
REFERENCES_MAX = 16
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def typed(text: str, kinds: frozenset[str]) -> object:
    """What a text is, of these types: a string when in doubt."""
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        value = read_whole(text)
    except Malformed:
        return text
    return value if kinds or isinstance(value, (dict, list)) else text


def without_padding(text: str, *, always: bool = False) -> str:
    """A text without the line breaks that belong to the tags around it.

    That is one at either end; the one at the end only if there is one at the start, or the format `always`
    has both.
    """
    inner = text.removeprefix("\n")
    return inner.removesuffix("\n") if always or len(inner) < len(text) else text


def told_kinds(parameters: Schema, key: str, told: str | None = None) -> frozenset[str]:
    """The types that an argument may have by its schema, and by what its own tag tells.

    A tag tells the name of a type, or `true` for a string and `false` for anything else.
    """
    kinds = kinds_of(property_of(parameters, key), parameters)
    if told is None:
        return kinds
    return frozenset({"string"}) if told in ("true", "string") else (kinds - {"string"}) or frozenset({"any"})


def property_of(parameters: Schema, key: str) -> object:
    """The schema of one argument, None if there is none."""
    properties = resolved(parameters, parameters).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def kinds_of(schema: object, root: Schema) -> frozenset[str]:
    """The types that a schema names, or that its values have; none where anything goes."""
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
    """The values that `const` or `enum` leave; None if neither is there."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def alternatives(schema: object, root: Schema, depth: int = REFERENCES_MAX) -> Iterator[Schema]:
    """The schemas that `anyOf` and `oneOf` choose from, references followed; the schema itself without
    these."""
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
    """The schema that a reference within `root` leads to; `allOf` of one is that one."""
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
