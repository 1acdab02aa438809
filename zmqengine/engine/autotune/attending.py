"""A layer's own code, as far as its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.autotune import attention


class Attends(NamedTuple):
    """What a layer attends with: queries, keys and values [rows, heads, width, dim], and by what scores are scaled."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float


class KeyValues:
    """What a layer is given for a cache meanwhile."""

    def __init__(self, offset: mx.array) -> None:
        self.offset = offset
        self.written: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Just these."""
        if self.written is not None:
            raise TypeError("a layer that writes keys twice")
        self.written = keys, values
        return self.written


class _Attends(Exception):
    """The layer has come to its attention."""

    def __init__(self, what: Attends) -> None:
        self.what = what


def until_it_attends(
    call: Callable[[mx.array, None, KeyValues], Any],
    modules: Sequence[ModuleType],
    inputs: mx.array,
    offset: mx.array,
) -> Attends:
    """`call` a layer with inputs [rows, width, dim] for rows that stand at `offset`, until it attends by a function of
    one of these modules. Raises TypeError if it attends in a way of its own, or not."""
    cache = KeyValues(offset)

    def stop(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, sinks: Any = None, **_: Any
    ) -> mx.array:
        written = cache.written or (None, None)
        if sinks is not None or keys is not written[0] or values is not written[1]:
            raise TypeError("a layer that attends in a way of its own")
        raise _Attends(Attends(queries, keys, values, scale))

    with attending(modules, stop):
        try:
            call(inputs, None, cache)
        except _Attends as found:
            return found.what
    raise TypeError("a layer that does not attend")


@contextmanager
def attending(modules: Sequence[ModuleType], function: Callable[..., mx.array]) -> Iterator[None]:
    """Have `modules` attend by this function for a while."""
    before = [getattr(module, attention.NAME) for module in modules]
    for module in modules:
        setattr(module, attention.NAME, function)
    try:
        yield
    finally:
        for module, known in zip(modules, before, strict=True):
            setattr(module, attention.NAME, known)
