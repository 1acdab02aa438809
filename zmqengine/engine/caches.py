"""What we ask of mlx-lm's caches: for one row, for a batch, and in bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.engine.mlx_lm_border import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from zmqengine.engine.row import Caches


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def can_merge(caches: Caches) -> bool:
    """Whether rows with such caches can be stepped together."""
    return all(hasattr(cache, "merge") for cache in caches)


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be cut off."""
    return bool(can_trim_prompt_cache(caches))


def merge(rows: Sequence[Caches]) -> Caches:
    """The caches of a batch of these rows, in this order. The rows' own caches stay as they are."""
    return [same_layer[0].merge(list(same_layer)) for same_layer in zip(*rows, strict=True)]


def extend(caches: Caches, others: Caches) -> Caches:
    """Add the rows of `others` at the end of a batch."""
    if not caches:
        return others
    for cache, other in zip(caches, others, strict=True):
        cache.extend(other)
    return caches


def keep_rows(caches: Caches, places: list[int]) -> Caches:
    """Keep just the rows at `places` of a batch."""
    if not places:
        return []
    for cache in caches:
        cache.filter(places)
    return caches


def extract(caches: Caches, place: int) -> Caches:
    """The caches of one row of a batch, as copies."""
    return [cache.extract(place) for cache in caches]


def take_prefix(caches: Caches, held: int, wanted: int) -> Caches | None:
    """A copy of the caches of a row that hold `held` tokens, cut to the first `wanted`; None if they can't be."""
    if held != wanted and not can_trim(caches):
        return None
    taken = copy.deepcopy(caches)
    if held != wanted:
        trim_prompt_cache(taken, held - wanted)
    return taken


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
