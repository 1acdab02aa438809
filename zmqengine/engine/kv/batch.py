"""Caches of a batch of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv import in_place, plain, ragged
from zmqengine.engine.kv.ragged import RaggedKVCache, close_gaps, columns_of, make_room, standing
from zmqengine.engine.kv.rows import arrays, start
from zmqengine.engine.models.mlx_lm import BatchRotatingKVCache, KVCache
from zmqengine.engine.row import Caches


def can_merge(caches: Caches) -> bool:
    """Whether rows with such caches can be stepped together."""
    return all(hasattr(cache, "merge") for cache in caches)


def merge(rows: Sequence[Caches]) -> Caches:
    """The caches of a batch of these rows, in this order. The rows' own caches stay as they are."""
    layers = list(zip(*rows, strict=True))
    plain_layers = [layer for layer in layers if plain.are_plain_rows(layer)]
    merged = iter(plain.merge(plain_layers) if plain_layers else [])
    return [
        next(merged)
        if plain.are_plain_rows(layer)
        else RaggedKVCache.merge(layer)
        if all(type(cache) is KVCache for cache in layer)
        else layer[0].merge(list(layer))
        for layer in layers
    ]


def extend(caches: Caches, others: Caches, held: Sequence[int]) -> Caches:
    """Add the rows of `others` at the end of a batch whose rows hold `held`."""
    if not caches:
        return others
    if in_place.extend(caches, others):
        return caches
    close_gaps(caches, held)
    pairs = list(zip(caches, others, strict=True))
    alike = [pair for pair in pairs if all(map(plain.is_plain, pair))]
    if alike:
        plain.extend([cache for cache, _ in alike], [other for _, other in alike])
    for cache, other in pairs:
        if not (plain.is_plain(cache) and plain.is_plain(other)):
            cache.extend(other)
    return caches


def keep_rows(caches: Caches, places: list[int], held: Sequence[int]) -> Caches:
    """Keep just the rows at `places` of a batch, `arranged` where it `moves_rows`; `held` is how many tokens each row
    of the batch holds."""
    if not places:
        return []
    if in_place.keep_rows(caches, places, held):
        return caches
    if getattr(caches[0], "gaps", None) is not None:
        ragged.keep_rows(caches, places, held)
        return caches
    plain.keep_rows(filter(plain.is_plain, caches), places, held)
    for cache in caches:
        if type(cache) is BatchRotatingKVCache and cache.keys is not None:
            _keep_rows_of_window(cache, mx.array(places), [held[place] for place in places])
        elif not plain.is_plain(cache):
            cache.filter(places)
    return caches


def begin_step(
    caches: Caches,
    inputs: mx.array,
    held: Sequence[int],
    *,
    copied: bool,
    idle: bool = False,
) -> None:
    """Before a step of `inputs` [rows, columns], for a batch whose rows hold `held`: `make_room`.

    And begin with what it goes on from, apart from it: what was `copied` as rows came and went, and where rows stand if
    several columns are added.

    CUDA graphs are kept: in one with the step, each pair of what was copied and how many rows there are would be new.
    """
    copied |= make_room(caches, inputs.shape[1], held, idle=idle)
    columns = inputs.shape[1]
    if on_cuda() and (copied or columns > 1):
        start(inputs, standing(caches, columns) if columns > 1 else [], arrays(caches) if copied else [])


def extract(caches: Caches, place: int, held: int, wanted: int | None = None) -> Caches:
    """The caches of the row at `place`, which holds `held` tokens, as copies: of the first `wanted` where it
    `can_go_back`, else of all."""
    return [
        _extract_kv(cache, place, held, held if wanted is None else wanted)
        if type(cache) is RaggedKVCache and cache.keys is not None
        else cache.extract(place)
        for cache in caches
    ]


def _keep_rows_of_window(cache: Any, index: mx.array, lengths: list[int]) -> None:
    # BatchRotatingKVCache.filter keeps all the columns, also when no row that stays has filled its window.
    cache.filter(index)
    spare = cache.keys.shape[2] if cache.rotated else cache._idx
    spare -= max(lengths)
    if spare <= 0:
        return
    cache._temporal_order()
    cache.keys = mx.contiguous(cache.keys[..., spare : cache._idx, :])
    cache.values = mx.contiguous(cache.values[..., spare : cache._idx, :])
    cache._idx -= spare
    cache._offset = cache._idx
    cache.left_padding -= spare


def _extract_kv(cache: Any, place: int, held: int, wanted: int) -> KVCache:
    single = KVCache()  # type: ignore[no-untyped-call]
    span: Any = slice(cache._idx - held, cache._idx - held + wanted)
    if cache.gaps is not None:
        span = mx.array(columns_of(cache, place, held)[:wanted])
    single.keys = mx.contiguous(cache.keys[place : place + 1, :, span])
    single.values = mx.contiguous(cache.values[place : place + 1, :, span])
    single.offset = wanted
    return single
