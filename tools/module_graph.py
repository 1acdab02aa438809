"""The import graph of the distribution, read from the code. Imports anywhere in a file count, also for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "clients"

Graph = Mapping[str, frozenset[str]]
"""Module or folder names, and the names that each imports."""


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the distribution by its full name; a package's `__init__` has the package's name."""
    found = {}
    for base, root in ((ROOT / "zmqengine", ROOT), (CLIENTS, CLIENTS)):
        for path in sorted(base.rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once."""
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of a file's imports, ours or not. Imports here are absolute."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            assert node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module


@cache
def files() -> Graph:
    """The imports among our own files."""
    return {
        name: frozenset(other for other in imports(path) if other in modules() and other != name)
        for name, path in modules().items()
    }


def packages() -> list[str]:
    """Packages with more than an `__init__`, by name; "" is the distribution, with the parts of `zmqengine`."""
    found = {name for name, path in modules().items() if path.name == "__init__.py"} - {"zmqengine"}
    return ["", *sorted(name for name in found if any(other.startswith(name + ".") for other in modules()))]


def inside(package: str) -> Graph:
    """Imports among the files and folders of a package. `__init__` is a part of its own."""
    graph: dict[str, set[str]] = {}
    for name, others in files().items():
        part = _part(package, name)
        if part is None:
            continue
        arrows = graph.setdefault(part, set())
        arrows |= {other_part for other in others if (other_part := _part(package, other))} - {part}
    return {part: frozenset(arrows) for part, arrows in graph.items()}


def floors(graph: Graph) -> list[list[str]]:
    """The graph in layers, the lowest first: each part is one above the highest that it imports.

    Raises ValueError with the cycle if there is one.
    """
    heights: dict[str, int] = {}

    def height(part: str, path: tuple[str, ...]) -> int:
        if part in path:
            raise ValueError(" -> ".join([*path[path.index(part) :], part]))
        if part not in heights:
            below = [height(other, (*path, part)) for other in sorted(graph[part])]
            heights[part] = max(below, default=-1) + 1
        return heights[part]

    for part in sorted(graph):
        height(part, ())
    tower: list[list[str]] = [[] for _ in range(max(heights.values(), default=-1) + 1)]
    for part in sorted(graph):
        tower[heights[part]].append(part)
    return tower


def _part(package: str, name: str) -> str | None:
    """The part of `package` that a module belongs to; None if it is elsewhere."""
    if package:
        if name == package:
            return "__init__"
        if not name.startswith(package + "."):
            return None
        return name.removeprefix(package + ".").split(".")[0]
    # The distribution: the parts of zmqengine and the front-end packages stand side by side.
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "zmqengine" else parts[0]
