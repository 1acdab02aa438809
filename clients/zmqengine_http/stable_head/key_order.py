"""Tools in one order, whatever order a client's hash maps had them in."""

from __future__ import annotations

from collections.abc import Sequence

_FIRST = ("type", "function", "name", "title", "description", "parameters", "properties", "items", "required")
_RANK = {name: place for place, name in enumerate(_FIRST)}


def in_one_order(tools: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], int]:
    """The tools by name, their keys in a fixed order; and whether that changed anything, as 0 or 1."""
    ordered = [_ordered(tool) for tool in sorted(tools, key=_name)]
    return [tool for tool, _ in ordered], int(
        any(moved for _, moved in ordered)
        or [_name(tool) for tool in tools] != [_name(t) for t, _ in ordered]
    )


def _name(tool: dict[str, object]) -> str:
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


def _ordered(value: dict[str, object]) -> tuple[dict[str, object], bool]:
    keys = list(value)
    names = sorted(keys, key=_place)
    moved = names != keys
    ordered: dict[str, object] = {}
    for name in names:
        item = value[name]
        if isinstance(item, dict):
            item, inner = _ordered(item)
            moved = moved or inner
        elif isinstance(item, list):
            item, inner = _in_list(item)
            moved = moved or inner
        ordered[name] = item
    return ordered, moved


def _in_list(items: list[object]) -> tuple[list[object], bool]:
    # The order of a list has a meaning, that of the keys inside it has none.
    ordered = [_ordered(item) if isinstance(item, dict) else (item, False) for item in items]
    return [item for item, _ in ordered], any(moved for _, moved in ordered)


def _place(name: str) -> tuple[int, str]:
    return _RANK.get(name, len(_RANK)), name
