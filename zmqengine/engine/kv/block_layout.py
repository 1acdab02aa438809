"""Blocks of tokens, cut out of caches for the prefix cache, and caches built of blocks.

Keys and values of plain caches are cut at any token. Everything else, a sliding window or a recurrent state, is usable
only as a whole and only after the token at which it was copied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS
from zmqengine.engine.kv.kv_batch import BatchRow
from zmqengine.engine.kv.row_caches import new_caches, single_caches, start
from zmqengine.engine.models.mlx_lm import KVCache
from zmqengine.engine.row import Caches

# Maximum tokens copied at once.
_COPIED_TOKENS = 1024
_ARRAY = "array"
_RESTORED_BYTES = 256 << 20
"""Maximum bytes of a restored prompt in one computation: macOS ends a command buffer after 5 s, and did so to one that
restored 9 GB (MTPLX issue 422)."""

Source = Caches | BatchRow
"""The caches of one row, or a row of a batch; copies of the latter are started before the rows of its batch change."""


class State(NamedTuple):
    """The state of all layers that cannot be cut; `form`: JSON that locates each array in it."""

    form: str
    arrays: tuple[mx.array, ...]


class _Group(NamedTuple):
    """Arrays of one shape and type, stored as one: (index of the cache, attribute) of each."""

    arrays: list[tuple[int, str]]
    heads: int
    width: int
    dtype: mx.Dtype


class BlockLayout:
    """Layout of one model's blocks; `caches`: those of a row with at least one token."""

    def __init__(self, caches: Caches) -> None:
        groups: dict[tuple[int, int, mx.Dtype], _Group] = {}
        self._states: list[int] = []
        for index, cache in enumerate(single_caches(caches)):
            if not isinstance(cache, KVCache):
                self._states.append(index)
                continue
            for name in ("keys", "values"):
                array = getattr(cache, name)
                if array is not None:
                    shape = (array.shape[1], array.shape[3], array.dtype)
                    groups.setdefault(shape, _Group([], *shape)).arrays.append((index, name))
        self._groups = list(groups.values())

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether no layer has a state that cannot be cut."""
        return not self._states

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the layers that can be cut at any token."""
        return sum(len(group.arrays) * group.heads * group.width * group.dtype.size for group in self._groups)

    def describe(self) -> str:
        """Description of the layout; blocks fit another engine's model where it is equal."""
        groups = [(group.arrays, group.heads, group.width, str(group.dtype)) for group in self._groups]
        return json.dumps([groups, self._states])

    def take(self, source: Source, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """Copy the tokens from `start` to the first of `cuts`, from there to the next, and so on.

        Each part is one array for each group, of shape (arrays of the group, 1, heads, tokens, width).
        """
        parts: list[list[mx.array]] = []
        while len(parts) < len(cuts):
            # In pieces, since two copies of a piece exist at once.
            taken = [cut for cut in cuts[len(parts) :] if cut - start <= _COPIED_TOKENS] or [cuts[len(parts)]]
            whole = [_stack(source, group, start, taken[-1]) for group in self._groups]
            begins = [start, *taken]
            parts += [
                [mx.contiguous(array[..., begin - start : end - start, :]) for array in whole]
                for begin, end in zip(begins, taken, strict=False)
            ]
            start = taken[-1]
        if isinstance(source, BatchRow):
            source.batch.cut([array for part in parts for array in part])
        return parts

    def take_state(self, source: Source) -> State | None:
        """Copy the state of the layers that cannot be cut; None where all can."""
        if not self._states:
            return None
        singles = (
            source.extract(self._states) if isinstance(source, BatchRow) else list(single_caches(source))
        )
        arrays: list[mx.array] = []
        form = [_flatten(singles[index].state, arrays) for index in self._states]
        state = State(json.dumps(form), tuple(map(mx.contiguous, arrays)))
        if isinstance(source, BatchRow):
            source.batch.cut(state.arrays)
        return state

    def build(
        self,
        model: Any,
        parts: Sequence[Sequence[mx.array]],
        tokens: int,
        state: tuple[str, Sequence[mx.array]] | None,
    ) -> Caches:
        """New caches of one row with the first `tokens` of consecutive `parts`, and `state`; all copies."""
        caches = new_caches(model)
        singles = list(single_caches(caches))
        whole = sum(part[0].shape[-2] for part in parts[:-1]) if self._groups else 0
        for number, group in enumerate(self._groups):
            spare = mx.zeros((1, group.heads, GROWTH_TOKENS, group.width), group.dtype)
            array_bytes = (tokens + GROWTH_TOKENS) * group.heads * group.width * group.dtype.size
            # Some sparse attention's index has values of width 0.
            lot = max(1, _RESTORED_BYTES // max(1, array_bytes))
            for first in range(0, len(group.arrays), lot):
                # All arrays of a group at once: one copy for each block, not one for each block and array.
                pieces = [part[number][first : first + lot] for part in parts]
                pieces[-1] = pieces[-1][..., : tokens - whole, :]
                merged = mx.concatenate(pieces, axis=-2)
                restored = []
                for (index, name), array in zip(group.arrays[first : first + lot], merged, strict=True):
                    # A separate array for each cache, or its first write would copy all of them again.
                    restored.append(mx.concatenate([array, spare], axis=-2))
                    setattr(singles[index], name, restored[-1])
                    singles[index].offset = tokens
                if len(restored) < len(group.arrays):
                    start(restored)
        if state is not None:
            form, arrays = state
            for index, nested in zip(self._states, json.loads(form), strict=True):
                singles[index].state = _unflatten(nested, arrays)
        return caches


def _stack(source: Source, group: _Group, start: int, end: int) -> mx.array:
    """Tokens `start` to `end` of a group's arrays: (arrays of the group, 1, heads, tokens, width)."""
    if isinstance(source, BatchRow):
        return source.cut(group.arrays, start, end)
    singles = list(single_caches(source))
    return mx.concatenate([getattr(singles[cache], name)[..., start:end, :] for cache, name in group.arrays])[
        :, None
    ]


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
