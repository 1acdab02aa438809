"""Sizes of arrays, rounded up to few: MLX traces each shape, and reuses a freed buffer for about its size alone."""

from __future__ import annotations


def few_sizes(count: int, least: int = 1) -> int:
    """`count`, at least 1, up to one of four numbers between two powers of two, and to a multiple of `least`."""
    multiple = max(least, (1 << (count - 1).bit_length()) // 8)
    return -(-count // multiple) * multiple
