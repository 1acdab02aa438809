"""Blocks in 8 bits of caches with all bits: quantised when they are cut out of them, restored when caches are built.

Each array becomes three, by `mx.quantize` along the head dimension: numbers of 8 bits, a scale and a bias for each
group. States that cannot be cut (sliding windows, recurrent ones) stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.block_layout import BlockLayout, Group, Parts, State
from zmqengine.engine.kv.eight_bits import BITS, PackedColumns, group_size, packed, widened


def blocks_at_rest(
    layout: BlockLayout | None, restore: Callable[..., Any], bits: int | None
) -> tuple[BlockLayout | None, Callable[..., Any]]:
    """The layout of blocks in so many bits, and the way from them to caches; without `bits` those that are given."""
    if layout is None or bits is None or in_8_bits(layout):
        return layout, restore
    blocks = PackedBlocks(layout)
    return blocks, lambda parts, *more: restore(blocks.wide(parts), *more)


def in_8_bits(layout: BlockLayout) -> bool:
    """Whether caches hold 8 bits, and blocks are cut out of them as they are."""
    return any(group.dtype == mx.uint32 for group in layout.groups)


class PackedBlocks:
    """`BlockLayout` that quantises the blocks of another one."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self.group_sizes = [group_size(group.dim) for group in layout.groups]
        """Numbers of each group of arrays that share a scale and a bias; None where all bits are kept."""

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
            for group, size in zip(self.groups, self.group_sizes, strict=True)
        )

    def describe(self) -> str:
        """See `BlockLayout`."""
        return json.dumps([self._layout.describe(), BITS, self.group_sizes])

    def take(self, source: Any, start: int, cuts: Sequence[int]) -> list[list[mx.array]]:
        """See `BlockLayout`."""
        return [
            [
                array
                for wide, size in zip(part, self.group_sizes, strict=True)
                for array in ([wide] if size is None else packed(wide, size))
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
        for size in self.group_sizes:
            if size is None:
                arrays.append(part.pop(0))
            else:
                arrays.append(_PackedArray(PackedColumns(*part[:3])))
                del part[:3]
        return arrays


class _PackedArray:
    """Arrays of a group in 8 bits; a slice of them is wide."""

    def __init__(self, arrays: PackedColumns) -> None:
        self._arrays = arrays

    def __getitem__(self, chosen: slice) -> mx.array:
        return widened(PackedColumns(*(each[chosen] for each in self._arrays)))


def _packed_bytes(group: Group, size: int | None) -> int:
    """Bytes of one token in one head of an array."""
    if size is None:
        return group.dim * group.dtype.size
    return group.dim * BITS // 8 + 2 * group.dim // size * group.dtype.size
