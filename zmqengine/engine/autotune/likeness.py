"""Which modules differ in nothing but their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

Slots = list[tuple[Any, Any]]
"""Where arrays stand: in what, and under which name or number."""

_VALUES = (bool, int, float, complex, str, bytes, type(None), mx.Dtype)
_HOLDS = (dict, list, tuple)


def taken_apart(module: Module) -> tuple[object, Slots]:
    """What `module` is but for the values of its arrays, to be compared, and where its arrays stand.

    Modules of which the first is equal compute the same from arrays of the same slots.
    """
    parts: list[object] = []
    slots: Slots = []
    _take_apart(module, parts, slots, {})
    return tuple(parts), slots


@contextmanager
def filled(slots: Slots, arrays: Sequence[mx.array]) -> Iterator[None]:
    """Have these arrays in their slots for a while."""
    before = [held[name] for held, name in slots]
    try:
        for (held, name), array in zip(slots, arrays, strict=True):
            held[name] = array
        yield
    finally:
        for (held, name), array in zip(slots, before, strict=True):
            held[name] = array


def _take_apart(value: Any, parts: list[object], slots: Slots, seen: dict[int, int]) -> None:
    if isinstance(value, _VALUES):
        parts.append((type(value), value))
    elif id(value) in seen:
        parts.append(("again", seen[id(value)]))
    else:
        seen[id(value)] = len(seen)
        _take_members_apart(value, parts, slots, seen)


def _take_members_apart(value: Any, parts: list[object], slots: Slots, seen: dict[int, int]) -> None:
    parts.append(type(value))
    if isinstance(value, set | frozenset):
        parts.append(frozenset(value))
    elif not isinstance(value, _HOLDS) and not _shows_all(value):
        # Functions and all else that is not known are like nothing but themselves.
        parts.append(id(value))
        return
    if isinstance(value, _HOLDS):
        parts.append(len(value))
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            parts.append(name)
            if isinstance(part, mx.array) and not isinstance(value, tuple):
                parts.append((tuple(part.shape), part.dtype))
                slots.append((value, name))
            else:
                _take_apart(part, parts, slots, seen)
    if hasattr(value, "__dict__"):
        _take_apart(vars(value), parts, slots, seen)


def _shows_all(value: Any) -> bool:
    """Whether all that an object knows is in its `__dict__`."""
    kind: Any = type(value)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return hasattr(value, "__dict__") and kind.__new__ is object.__new__ and not has_slots
