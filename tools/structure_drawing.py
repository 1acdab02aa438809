"""Draws which package stands on which, and in each of them which file."""

from __future__ import annotations

from tools.module_graph import Graph, floors, inside, packages

PAGE = "docs/structure.md"


def parts() -> dict[str, str]:
    """The drawings by the names of their places in the page."""
    return {"packages": _arrows(inside("")), "files": "\n".join(map(_tower, packages()[1:]))}


def _arrows(graph: Graph) -> str:
    """A diagram; an arrow that another way makes plain is left out."""
    lines = ["```mermaid", "graph TD"]
    for floor in reversed(floors(graph)):
        for part in floor:
            direct = graph[part] - {below for other in graph[part] for below in _below(graph, other)}
            lines += (
                [f"    {part}"] if not direct else [f"    {part} --> {other}" for other in sorted(direct)]
            )
    return "\n".join([*lines, "```", ""])


def _below(graph: Graph, part: str) -> set[str]:
    found: set[str] = set()
    new = set(graph[part])
    while new:
        found |= new
        new = {below for other in new for below in graph[other]} - found
    return found


def _tower(package: str) -> str:
    """A package's floors, the highest first: what stands on one imports only from those below."""
    graph = inside(package)
    try:
        tower = floors(graph)
    except ValueError as circle:
        return f"### {package}\n\nNot a tower yet: {circle}.\n"
    width = max(map(len, graph))
    lines = [f"### {package}", "", "```"]
    for height, floor in reversed(list(enumerate(tower))):
        for part in floor:
            lines.append(f"{height:>2}  {part:<{width}}  {' '.join(sorted(graph[part]))}".rstrip())
    return "\n".join([*lines, "```", ""])
