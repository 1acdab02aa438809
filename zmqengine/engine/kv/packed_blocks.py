"""Blocks at rest in 8 bits: quantised when they are cut out of caches, restored when caches are built of them.

Each array becomes three, by `mx.quantize` along the head dimension: numbers of 8 bits, a scale and a bias for each
group. States that cannot be cut (sliding windows, recurrent ones) stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.block_layout import BlockLayout, Group, Parts, State

BITS = 8
GROUP_SIZES = (64, 32)
"""Numbers that share a scale and a bias: the first of these that divides the head dimension."""


def group_size(dim: int) -> int | None:
    """Size of the groups of an array; None where its head dimension has none, and it stays as it is."""
    return next((size for size in GROUP_SIZES if dim and dim % size == 0), None)


def blocks_at_rest(
    layout: BlockLayout | None, restore: Callable[..., Any], bits: int | None
) -> tuple[BlockLayout | None, Callable[..., Any]]:
    """The layout of blocks in so many bits, and the way from them to caches; without `bits` those that are given."""
    if layout is None or bits is None:
        return layout, restore
    packed = PackedBlocks(layout)
    return packed, lambda parts, *more: restore(packed.wide(parts), *more)


class PackedBlocks:
    """`BlockLayout` that quantises the blocks of another one."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._sizes = [group_size(group.dim) for group in layout.groups]

    @property
    def groups(self) -> Sequence[Group]:
        """See `BlockLayout`."""
        return self._layout.groups

    @property
    def is_cut_anywhere(self) -> bool:
        """See `BlockLayout`."""
        return self._layout.is_cut_anywhere

    @property
    def token_bytes(self) -> int:
        """See `BlockLayout`."""
        return sum(
            len(group.arrays) * group.heads * _packed_bytes(group, size)
            for group, size in zip(self.groups, self._sizes, strict=True)
        )

    def describe(self) -> str:
        """See `BlockLayout`."""
        return json.dumps([self._layout.describe(), BITS, self._sizes])

    def take(self, source: Any, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """See `BlockLayout`."""
        return [
            [
                array
                for wide, size in zip(part, self._sizes, strict=True)
                for array in ([wide] if size is None else _packed(wide, size))
            ]
            for part in self._layout.take(source, start, cuts)
        ]

    def build(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Any:
        """See `BlockLayout`."""
        return self._layout.build(self.wide(parts), tokens, state, room)

    def take_state(self, source: Any) -> State | None:
        """See `BlockLayout`."""
        return self._layout.take_state(source)

    def wide(self, parts: Parts) -> list[list[Any]]:
        """Parts for the other layout to build caches of. Each array is restored where it is sliced, a lot at a time."""
        return [self._wide(list(part)) for part in parts]

    def _wide(self, part: list[mx.array]) -> list[Any]:
        arrays: list[Any] = []
        for size in self._sizes:
            if size is None:
                arrays.append(part.pop(0))
            else:
                arrays.append(_PackedArray(part[:3], size))
                del part[:3]
        return arrays


class _PackedArray:
    """Arrays of a group in 8 bits; a slice of them is wide."""

    def __init__(self, packed: Sequence[mx.array], size: int) -> None:
        self._packed = packed
        self._size = size

    def __getitem__(self, arrays: slice) -> mx.array:
        numbers, scales, biases = (each[arrays] for each in self._packed)
        return mx.dequantize(numbers, scales, biases, group_size=self._size, bits=BITS)


def _packed(wide: mx.array, size: int) -> tuple[mx.array, mx.array, mx.array]:
    numbers, scales, biases = mx.quantize(wide, group_size=size, bits=BITS)
    # A NaN beside other numbers leaves no trace in scale and bias, and blocks that hold one must not be used.
    largest = mx.max(mx.abs(wide.reshape(*wide.shape[:-1], -1, size)), axis=-1)
    return numbers, scales + 0 * largest, biases


def _packed_bytes(group: Group, size: int | None) -> int:
    """Bytes of one token in one head of an array."""
    if size is None:
        return group.dim * group.dtype.size
    return group.dim * BITS // 8 + 2 * group.dim // size * group.dtype.size
