"""Caches of one row: a cache of mlx-lm for each layer, or a list of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from zmqengine.engine.kv import rotating
from zmqengine.engine.models.mlx_lm import KVCache, make_prompt_cache
from zmqengine.engine.row import Caches


class RowKVCache(KVCache):
    """mlx-lm's cache of one layer of one row, with arrays that may be this row's own: a kernel may append to those.

    `room_wanted`: columns of the whole prompt, so that the arrays are allocated once.
    """

    keys: Any
    values: Any
    offset: int

    def __init__(self) -> None:
        self._own_keys: mx.array | None = None
        # The arrays that `own` took, which depend on no write.
        self._taken: tuple[mx.array, mx.array] | None = None
        self._corners: tuple[mx.array, mx.array] | None = None
        self.room_wanted = 0
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def corners(self) -> tuple[mx.array, mx.array]:
        """As `RaggedKVCache.corners`, of arrays that are this row's own."""
        assert self._corners is not None, "a kernel appends to arrays of this row alone"
        return self._corners

    @property
    def room(self) -> int:
        """Columns of arrays that are this row's alone, used ones included; 0 if the arrays may be shared."""
        own = self._own_keys
        return 0 if own is None or own is not self.keys else int(own.shape[2])

    def can_write_here(self, count: int, dtype: mx.Dtype) -> bool:
        """Whether `count` columns may be appended in place: the arrays are this row's alone, and large enough."""
        return self.offset + count <= self.room and bool(self.keys.dtype == dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write by MLX, as mlx-lm's cache does. The arrays are not this row's own then: MLX may have copied them."""
        self._own_keys = self._taken = self._corners = None
        return super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]

    def own(self, keys: mx.array, values: mx.array) -> None:
        """Take arrays in memory that nothing else refers to, which hold the columns so far."""
        self.keys, self.values, self._own_keys = keys, values, keys
        self._taken = keys, values
        self._corners = keys[:1, :, :1], values[:1, :, :1]

    def wrote_in_place(self, count: int, done: mx.array) -> bool:
        """Note that the computation of `done` writes `count` columns; readers of the arrays depend on it.

        Returns False: the device need not start on it now.
        """
        self.keys, self.values = mx.depends([self.keys, self.values], [done])
        self._own_keys = self.keys
        self.offset += count
        return False

    def rewind(self) -> None:
        """Forget all tokens of arrays with `room`; their writes need not be computed any more."""
        assert self._taken is not None, "arrays of this row alone came by `own`"
        self.keys, self.values = self._taken
        self._own_keys = self.keys
        self.offset = 0


def new_caches(model: Any) -> Caches:
    """Empty caches for one row."""
    return list(make_prompt_cache(model))


def room(caches: Iterable[RowKVCache]) -> int:
    """Columns of one row's caches; 0 if there are none, or if their arrays may be shared."""
    return min((cache.room for cache in caches), default=0)


def rewound(caches: Caches) -> Caches:
    """One row's caches without their tokens; none if their arrays may be shared.

    New columns overwrite the old ones in place: a step in flight reads those before, as a device computes in order.
    """
    if not room(caches):
        return []
    for cache in caches:
        cache.rewind()
    return caches


def single_caches(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches themselves, out of the lists of caches that some layers have."""
    for cache in caches:
        nested = getattr(cache, "caches", None)
        if nested is None:
            yield cache
        else:
            yield from single_caches(nested)


def begin_row_prefill(caches: Caches, tokens: Sequence[int], prompt_tokens: int = 0) -> mx.array:
    """Make room for tokens of one row, and return them for the model, [1, tokens].

    `prompt_tokens`: tokens of the whole prompt, where it is known. `end_row_prefill` must follow the model's call.
    """
    for cache in single_caches(caches):
        if isinstance(cache, RowKVCache):
            cache.room_wanted = prompt_tokens
        if isinstance(cache, KVCache):
            _drop_slack(cache, len(tokens))
    return mx.array([tokens], dtype=mx.uint32)


def end_row_prefill(caches: Caches) -> None:
    """Trim the caches of one row after the model's call."""
    for cache in single_caches(caches):
        if rotating.is_sliding(cache):
            rotating.trim_to_window(cache)


def prefill_row(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Prefill one row in a call of its own; returns the logits, not computed yet."""
    logits: mx.array = model(begin_row_prefill(caches, tokens), cache=caches)
    end_row_prefill(caches)
    return logits


def all_finite(values: Iterable[mx.array]) -> bool:
    """Whether every number is finite. Waits once, until they are computed."""
    finite = [mx.all(mx.isfinite(value)) for value in values]
    return not finite or bool(mx.all(mx.stack(finite)).item())


def arrays(caches: Iterable[Any]) -> list[mx.array]:
    """Every array of these caches, of a row or of a batch."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def start(*values: Any) -> None:
    """Start to compute arrays, or trees of them, without waiting."""
    mx.async_eval(*values)  # type: ignore[no-untyped-call]


def byte_count(caches: Iterable[Any]) -> int:
    return sum(cache.nbytes for cache in caches)


def _drop_slack(cache: Any, count: int) -> None:
    # A growing cache drops its unused columns, unless its length is a multiple of its growth step: then it would keep
    # both, and be larger than projected.
    spare = cache.keys is not None and cache.keys.shape[2] > cache.offset
    if spare and cache.offset % cache.step == 0 and cache.offset + count > cache.keys.shape[2]:
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]
