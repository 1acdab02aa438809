"""Types of arguments by their JSON schema, and the conversion of bare text, without quotes, to a value."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from zmqengine_client.text.tool_calls.lenient_json import Malformed, read_whole

Schema = Mapping[str, object]
REFERENCES_MAX = 16
"""References that lead from one to the next."""
REFERENCE_CHARS_MAX = 1000
"""The longest reference that is resolved: a place that many others refer to is resolved for each of them."""
ALTERNATIVES_MAX = 256
"""Alternatives of one schema that are read: each argument of a call reads those of its own, which may be shared."""
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


def argument_types(parameters: Schema, key: str, declared: str | None = None) -> frozenset[str]:
    """The types that an argument may have by its schema, and by `declared`, the type stated in its tag.

    A tag states the name of a type, or `true` for a string and `false` for any other.
    """
    kinds = types_of(property_of(parameters, key), parameters)
    if declared is None:
        return kinds
    return (
        frozenset({"string"})
        if declared in ("true", "string")
        else (kinds - {"string"}) or frozenset({"any"})
    )


def property_names(parameters: Schema) -> list[str]:
    """The names of the arguments that a schema describes, in its order."""
    properties = resolved(parameters, parameters).get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


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


def alternatives(schema: object, root: Schema) -> Iterator[Schema]:
    """The first alternatives of `anyOf` and `oneOf`, references resolved; without these the schema itself.

    Schemas are a graph, not a tree: a list of choices that several references lead to is read once.
    """
    waiting, seen = deque([schema]), set[int]()
    for _ in range(ALTERNATIVES_MAX):
        if not waiting:
            return
        part = waiting.popleft()
        if not isinstance(part, Mapping):
            continue
        part = resolved(part, root)
        choices = next((part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list)), None)
        if choices is None:
            yield part
        elif id(choices) not in seen:
            seen.add(id(choices))
            assert isinstance(choices, list)
            waiting.extendleft(reversed(choices[:ALTERNATIVES_MAX]))


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema with its reference within `root` resolved, and an `allOf` of one schema merged."""
    for _ in range(REFERENCES_MAX):
        parts = schema.get("allOf")
        reference = schema.get("$ref")
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            schema = _Overlaid(schema, "allOf", parts[0])
        elif isinstance(reference, str):
            found = _at(root, reference)
            if found is None:
                return schema
            schema = _Overlaid(schema, "$ref", found) if len(schema) > 1 else found
        else:
            break
    return schema


class _Overlaid(Mapping[str, object]):
    """A schema over the one that its `keyword` leads to. A copy would cost the size of that one at each reference."""

    def __init__(self, schema: Schema, keyword: str, base: Schema) -> None:
        self._schema = schema
        self._keyword = keyword
        self._base = base

    def __getitem__(self, name: str) -> object:
        return self._schema[name] if name != self._keyword and name in self._schema else self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._base), **dict.fromkeys(self._own())})

    def __len__(self) -> int:
        return len(self._base) + sum(name not in self._base for name in self._own())

    def _own(self) -> Iterator[str]:
        return (name for name in self._schema if name != self._keyword)


def _at(root: Schema, reference: str) -> Schema | None:
    if not reference.startswith("#") or len(reference) > REFERENCE_CHARS_MAX:
        return None
    found: object = root
    for step in reference[1:].strip("/").split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
