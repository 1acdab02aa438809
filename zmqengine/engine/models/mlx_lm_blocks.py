"""Blocks cut out of mlx-lm's caches, and caches built of blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS
from zmqengine.engine.kv.block_layout import (
    Group,
    Parts,
    State,
    cut,
    described,
    lots,
    merged,
    start,
    token_bytes,
)
from zmqengine.engine.models.mlx_lm import KVCache
from zmqengine.engine.models.mlx_lm_caches import Caches, new_caches, single_caches

_ARRAY = "array"


class MlxLmBlocks:
    """`BlockLayout` of mlx-lm's caches; `caches`: those of a row with at least one token."""

    def __init__(self, model: Any, caches: Caches) -> None:
        self._model = model
        groups: dict[tuple[int, int, mx.Dtype], Group] = {}
        self._states: list[int] = []
        for index, cache in enumerate(single_caches(caches)):
            if not isinstance(cache, KVCache):
                self._states.append(index)
                continue
            for name in ("keys", "values"):
                array = getattr(cache, name)
                if array is not None:
                    shape = (array.shape[1], array.shape[3], array.dtype)
                    groups.setdefault(shape, Group([], *shape)).arrays.append((index, name))
        self.groups = list(groups.values())

    @property
    def is_cut_anywhere(self) -> bool:
        """See `BlockLayout`."""
        return not self._states

    @property
    def token_bytes(self) -> int:
        """See `BlockLayout`."""
        return token_bytes(self.groups)

    def describe(self) -> str:
        """See `BlockLayout`."""
        return described(self.groups, self._states)

    def take(self, source: Any, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """See `BlockLayout`."""
        singles = list(single_caches(source.alone()))

        def stacked(group: Group, begin: int, end: int) -> mx.array:
            return mx.stack(
                [getattr(singles[cache], name)[..., begin:end, :] for cache, name in group.arrays]
            )

        return cut(self.groups, stacked, start, cuts)

    def take_state(self, source: Any) -> State | None:
        """See `BlockLayout`."""
        if not self._states:
            return None
        singles = list(single_caches(source.alone()))
        arrays: list[mx.array] = []
        form = [_flatten(singles[index].state, arrays) for index in self._states]
        return State(json.dumps(form), tuple(map(mx.contiguous, arrays)))

    def build(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Caches:
        """See `BlockLayout`."""
        caches = new_caches(self._model)
        singles = list(single_caches(caches))
        for number, group in enumerate(self.groups):
            spare = mx.zeros((1, group.heads, GROWTH_TOKENS, group.dim), group.dtype)
            for first, lot in lots(group, tokens):
                columns = merged(parts, number, first, lot, tokens)
                restored = []
                for (index, name), array in zip(group.arrays[first : first + lot], columns, strict=True):
                    # A separate array for each cache, or its first write would copy all of them again.
                    restored.append(mx.concatenate([array, spare], axis=-2))
                    setattr(singles[index], name, restored[-1])
                    singles[index].offset = tokens
                if lot < len(group.arrays):
                    start(restored)
        if state is not None:
            form, arrays = state
            for index, nested in zip(self._states, json.loads(form), strict=True):
                singles[index].state = _unflatten(nested, arrays)
        return caches


def _flatten(state: Any, arrays: list[mx.array]) -> Any:
    if isinstance(state, mx.array):
        arrays.append(state)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(state, (list, tuple)):
        return [_flatten(item, arrays) for item in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise TypeError(f"the state of this model's caches holds a {type(state).__name__}")


def _unflatten(form: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(form, dict):
        # A copy, since caches write into their arrays.
        return mx.array(arrays[form[_ARRAY]])
    if isinstance(form, list):
        return [_unflatten(item, arrays) for item in form]
    return form
