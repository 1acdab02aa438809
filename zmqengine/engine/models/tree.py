"""Named tuples of arrays flattened to a list, as arguments of a traced function, and rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import mlx.core as mx

Tree = TypeVar("Tree")
Part = TypeVar("Part")


def arrays_of(tree: Any) -> list[mx.array]:
    """The arrays in nested tuples, in order."""
    if isinstance(tree, mx.array):
        return [tree]
    return [array for part in tree for array in arrays_of(part)] if isinstance(tree, tuple) else []


def parts_of(tree: Any, kind: type[Part]) -> list[Part]:
    """The parts of type `kind` in nested tuples, outermost ones only, in order."""
    if isinstance(tree, kind):
        return [tree]
    return [found for part in tree for found in parts_of(part, kind)] if isinstance(tree, tuple) else []


def filled(tree: Tree, arrays: Iterator[mx.array]) -> Tree:
    """`tree` with its arrays replaced by the next ones of `arrays`."""
    return mapped(tree, mx.array, lambda _: next(arrays))


def mapped(tree: Tree, kind: type, replace: Callable[[Any], Any]) -> Tree:
    """`tree` with every part of type `kind` replaced."""
    found: Any = tree
    if isinstance(tree, kind):
        return replace(tree)  # type: ignore[no-any-return]
    if isinstance(tree, tuple):
        parts = (mapped(part, kind, replace) for part in tree)
        found = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return found  # type: ignore[no-any-return]


def kind_of(tree: Any) -> Hashable:
    """The structure of `tree` with shapes and types of its arrays: trees of equal structure can share a trace."""
    if isinstance(tree, mx.array):
        return tree.shape, str(tree.dtype)
    return (type(tree), *map(kind_of, tree)) if isinstance(tree, tuple) else tree
