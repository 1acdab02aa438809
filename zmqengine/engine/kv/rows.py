"""Caches of one row."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.engine.mlx_lm_border import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from zmqengine.engine.row import Caches


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be cut off."""
    return bool(can_trim_prompt_cache(caches))


def take_prefix(caches: Caches, held: int, wanted: int) -> Caches:
    """A copy of the caches of a row that hold `held` tokens, cut to the first `wanted`, where `can_trim` allows it."""
    taken = copy.deepcopy(caches)
    if held != wanted:
        trim_prompt_cache(taken, held - wanted)
    return taken


def are_finite(caches: Caches) -> bool:
    """Whether every number is one. Waits until they are computed."""
    return all(bool(mx.all(mx.isfinite(array)).item()) for array in arrays(caches))


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """Every array of these caches, to be evaluated."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def start(*values: Any) -> None:
    """Begin to compute arrays, or trees of them, without waiting."""
    mx.async_eval(*values)  # type: ignore[no-untyped-call]


def byte_count(caches: Iterable[Any]) -> int:
    """Bytes that these caches hold now."""
    return sum(cache.nbytes for cache in caches)


def single_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches themselves, out of the lists of caches that some layers have."""
    for cache in caches:
        nested = getattr(cache, "caches", None)
        if nested is None:
            yield cache
        else:
            yield from single_caches(nested)
