"""Refuses JSON schemas that no finite text satisfies: cyclic references, members that require themselves."""

from __future__ import annotations

import math
from typing import Any

_NODES_MAX = 200_000
"""Schema nodes visited before a schema counts as too complex; about 100 ms."""


def check_satisfiable(schema: dict[str, Any]) -> None:
    """Raises ValueError if every text of `schema` would be infinite, or if that takes too long to find out.

    The finite references are the least fixed point: one is finite once its target is, given those found so far.
    """
    search = _Search(schema)
    targets = {ref: search.resolve(ref) for ref in _references(schema)}
    is_new = True
    while is_new:
        new = {
            ref for ref, target in targets.items() if ref not in search.finite and search.is_finite(target)
        }
        search.finite |= new
        is_new = bool(new)
    if not search.is_finite(schema):
        raise ValueError(
            "the schema matches nothing: each of its values would hold itself, or a member that is false"
        )


class _Search:
    def __init__(self, root: dict[str, Any]) -> None:
        self.finite: set[str] = set()
        self._root = root
        self._nodes = 0

    def resolve(self, ref: str) -> Any:
        """The schema that a local reference names; `True` for any other, which the compiler refuses or accepts."""
        node: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name, True)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return True
        return node

    def is_finite(self, schema: Any) -> bool:
        """Whether some finite value satisfies `schema`, as far as references found finite so far show."""
        self._nodes += 1
        if self._nodes > _NODES_MAX:
            raise ValueError("the schema is too complex: too many references to each other")
        if not isinstance(schema, dict):
            return schema is not False
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and ref not in self.finite:
            return False
        if "const" in schema or "enum" in schema:
            return True
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and not any(map(self.is_finite, schema[keyword])):
                return False
        if isinstance(schema.get("allOf"), list) and not all(map(self.is_finite, schema["allOf"])):
            return False
        types = schema.get("type")
        return any(
            self._type_is_finite(type_, schema) for type_ in (types if isinstance(types, list) else [types])
        )

    def _type_is_finite(self, type_: Any, schema: dict[str, Any]) -> bool:
        match type_:
            case "object":
                return self._members_are_finite(schema)
            case "array":
                return self._items_are_finite(schema)
            case _:
                return True

    def _members_are_finite(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        named = properties if isinstance(properties, dict) else {}
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        patterns = schema.get("patternProperties")
        # Treat every pattern as applicable to every name; llguidance resolves the match.
        further = list(patterns.values()) if isinstance(patterns, dict) else []
        further.append(schema.get("additionalProperties", True))
        if not all(self.is_finite(named[name]) for name in names if name in named):
            return False
        if not names <= named.keys() and not any(map(self.is_finite, further)):
            return False
        if _least(schema, "minProperties") <= len(names):
            return True
        return any(map(self.is_finite, [*further, *(named[name] for name in named.keys() - names)]))

    def _items_are_finite(self, schema: dict[str, Any]) -> bool:
        least = _least(schema, "minItems")
        first = schema.get("prefixItems")
        needed = first[: math.ceil(least)] if isinstance(first, list) and least > 0 else []
        rest = [schema.get("items", True)] if least > len(needed) else []
        return all(self.is_finite(item) for item in [*needed, *rest])


def _least(schema: dict[str, Any], keyword: str) -> float:
    value = schema.get(keyword, 0)
    return value if isinstance(value, int | float) else 0


def _references(schema: Any) -> set[str]:
    """Local references anywhere in a schema."""
    references: set[str] = set()
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            ref = node.get("$ref")
            if isinstance(ref, str) and ref.startswith("#"):
                references.add(ref)
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    return references
