"""Blocks of tokens, cut out of KV caches for the prefix cache, and caches built of blocks.

Keys and values of plain caches are cut at any token. Everything else, a sliding window of mlx-lm's or a recurrent
state, is usable only as a whole and only after the token at which it was copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS
from zmqengine.engine.kv.slots import COPIED_TOKENS, Carry, Slot, Slots, grouped

_RESTORED_BYTES = 256 << 20
"""Maximum bytes of a restored prompt in one computation: macOS ends a command buffer after 5 s, and did so to one that
restored 9 GB (MTPLX issue 422)."""

Parts = Sequence[Sequence[mx.array]]
"""Consecutive parts of a prompt: one array for each group of a layout, [arrays of the group, 1, heads, tokens, dim]."""


class State(NamedTuple):
    """The state of all layers that cannot be cut; `form`: JSON that locates each array in it."""

    form: str
    arrays: tuple[mx.array, ...]


class Group(NamedTuple):
    """Arrays of one shape and type, stored as one."""

    arrays: list[tuple[int, str]]
    heads: int
    dim: int
    dtype: mx.Dtype


class BlockLayout(Protocol):
    """The layout of one model's blocks. `source` is the cache of a row, as its runner made it."""

    @property
    def groups(self) -> Sequence[Group]:
        """The arrays that can be cut at any token, those of one shape and type together."""
        ...

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether no layer has a state that cannot be cut."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the layers that can be cut at any token."""
        ...

    def describe(self) -> str:
        """Description of the layout; blocks fit another engine's model where it is equal."""
        ...

    def take(self, source: Any, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """Copies of the tokens from `start` to the first of `cuts`, from there to the next, and so on, as `Parts`."""
        ...

    def take_state(self, source: Any) -> State | None:
        """Copies of the state of the layers that cannot be cut; None where all can."""
        ...

    def build(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Any:
        """A new cache of a row with the first `tokens` of consecutive `parts`, and `state`; all copies.

        `room`: tokens that the row will have soon.
        """
        ...


class SlotBlocks:
    """`BlockLayout` of slots: keys and values are cut at any token, recurrent states are not."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.is_cut_anywhere = slots.states is None
        self.groups = [Group(names, *shape[:3]) for shape, names in grouped(slots.shapes).items()]

    @property
    def token_bytes(self) -> int:
        """See `BlockLayout`."""
        return token_bytes(self.groups)

    def describe(self) -> str:
        """See `BlockLayout`."""
        states = [] if self._slots.states is None else list(self._slots.states.layers)
        if self._slots.carry is not None:
            states.append([self._slots.carry])
        return described(self.groups, [[(each.shape, str(each.dtype)) for each in layer] for layer in states])

    def take(self, source: Slot, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """See `BlockLayout`."""
        return cut(
            self.groups,
            lambda group, begin, end: self._slots.copy(source, group.arrays, begin, end),
            start,
            cuts,
        )

    def take_state(self, source: Slot) -> State | None:
        """See `BlockLayout`."""
        if source.states is None:
            return None
        states = source.states.copy(source.state)
        if self._slots.carry is not None:
            states.append(self._carried(source))
        return State("slots", tuple(states))

    def _carried(self, source: Slot) -> mx.array:
        """A copy of the hidden state of a row's last token, [1, dim]; zeros without one."""
        assert self._slots.carry is not None, "the model has a head"
        place = None if source.carry is None else source.carry.place()
        if place is None:
            return mx.zeros((1, *self._slots.carry.shape), self._slots.carry.dtype)
        return place[0][mx.array([place[1]])]

    def build(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Slot:
        """See `BlockLayout`."""
        slot = self._slots.take(max(tokens, room))
        for number, group in enumerate(self.groups):
            for first, lot in lots(group, tokens):
                columns = merged(parts, number, first, lot, tokens)
                self._slots.restore(slot, group.arrays[first : first + lot], columns)
                if lot < len(group.arrays):
                    start(columns)
        if slot.states is not None:
            assert state is not None, "a prefix of a recurrent model ends at a checkpoint"
            slot.states.restore(slot.state, state[1])
            if self._slots.carry is not None:
                slot.carry = Carry(state[1][-1], 0)
        return slot


def token_bytes(groups: Sequence[Group]) -> int:
    """Bytes of one token in these groups."""
    return sum(len(group.arrays) * group.heads * group.dim * group.dtype.size for group in groups)


def described(groups: Sequence[Group], states: Sequence[Any]) -> str:
    """See `BlockLayout.describe`; `states`: those that cannot be cut."""
    return json.dumps([[(each.arrays, each.heads, each.dim, str(each.dtype)) for each in groups], states])


def cut(
    groups: Sequence[Group], stacked: Callable[[Group, int, int], mx.array], start: int, cuts: Sequence[int]
) -> list[list[mx.array]]:
    """See `BlockLayout.take`; `stacked` copies a group's tokens."""
    parts: list[list[mx.array]] = []
    while len(parts) < len(cuts):
        # In pieces, since two copies of a piece exist at once.
        taken = [cut for cut in cuts[len(parts) :] if cut - start <= COPIED_TOKENS] or [cuts[len(parts)]]
        whole = [stacked(group, start, taken[-1]) for group in groups]
        begins = [start, *taken]
        parts += [
            [mx.contiguous(array[..., begin - start : end - start, :]) for array in whole]
            for begin, end in zip(begins, taken, strict=False)
        ]
        start = taken[-1]
    return parts


def lots(group: Group, tokens: int) -> list[tuple[int, int]]:
    """Arrays of a group to restore at once: the first of them, and their number."""
    array_bytes = (tokens + GROWTH_TOKENS) * group.heads * group.dim * group.dtype.size
    # Some sparse attention's index has values of width 0.
    lot = max(1, _RESTORED_BYTES // max(1, array_bytes))
    return [(first, min(lot, len(group.arrays) - first)) for first in range(0, len(group.arrays), lot)]


def merged(parts: Parts, number: int, first: int, lot: int, tokens: int) -> mx.array:
    """The first `tokens` of some arrays of a group, [arrays, 1, heads, tokens, dim]: one copy for each block, not one
    for each block and array."""
    pieces = [part[number][first : first + lot] for part in parts]
    whole = sum(piece.shape[-2] for piece in pieces[:-1])
    pieces[-1] = pieces[-1][..., : tokens - whole, :]
    return mx.concatenate(pieces, axis=-2)


def all_finite(values: Iterable[mx.array]) -> bool:
    """Whether every number is finite. Waits once, until they are computed."""
    finite = [mx.all(mx.isfinite(value)) for value in values]
    return not finite or bool(mx.all(mx.stack(finite)).item())


def start(*values: Any) -> None:
    """Start to compute arrays, or trees of them, without waiting."""
    mx.async_eval(*values)  # type: ignore[no-untyped-call]
