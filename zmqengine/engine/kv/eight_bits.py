"""Numbers in 8 bits, as `mx.quantize` packs them: a scale and a bias for each group along the head dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

BITS = 8
GROUP_SIZES = (64, 32)
"""Numbers that share a scale and a bias: the first of these that divides the head dimension."""
PER_WORD = 32 // BITS
"""Numbers in an integer of the packed array."""


class PackedColumns(NamedTuple):
    """An array in 8 bits: integers [..., dim / `PER_WORD`], and scales and biases [..., dim / size of a group].

    Its parts are MLX's arrays or NumPy's.
    """

    numbers: Any
    scales: Any
    biases: Any

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a bias."""
        return int(PER_WORD * self.numbers.shape[-1] // self.scales.shape[-1])


def group_size(dim: int) -> int | None:
    """Size of the groups of an array; None where its head dimension has none, and it stays as it is."""
    return next((size for size in GROUP_SIZES if dim and dim % size == 0), None)


def packed(wide: mx.array, size: int) -> PackedColumns:
    """An array in 8 bits, in groups of `size`."""
    numbers, scales, biases = mx.quantize(wide, group_size=size, bits=BITS)
    # A NaN beside other numbers leaves no trace in scale and bias, and what holds one must not be used.
    largest = mx.max(mx.abs(wide.reshape(*wide.shape[:-1], -1, size)), axis=-1)
    return PackedColumns(numbers, scales + 0 * largest, biases)


def widened(array: Any) -> mx.array:
    """An array of MLX with all bits."""
    if not isinstance(array, PackedColumns):
        return array  # type: ignore[no-any-return]
    return mx.dequantize(*array, group_size=array.group_size, bits=BITS)


def by_part(change: Callable[..., Any], *arrays: Any) -> Any:
    """The result of `change` for arrays, or for each part of packed ones."""
    if isinstance(arrays[0], PackedColumns):
        return PackedColumns(*map(change, *arrays))
    return change(*arrays)
