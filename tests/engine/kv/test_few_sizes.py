"""Sizes of arrays, rounded up to few."""

from __future__ import annotations

import pytest

from zmqengine.engine.kv.few_sizes import few_sizes


@pytest.mark.parametrize(
    ("least", "sizes"),
    [(1, [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32]), (4, [4, 8, 12, 16, 20, 24, 28, 32]), (32, [32])],
)
def test_a_count_becomes_the_next_of_four_sizes_between_two_powers_of_two(
    least: int, sizes: list[int]
) -> None:
    """Those that are there already stay."""
    assert [few_sizes(count, least) for count in range(1, 33)] == [
        min(size for size in sizes if size >= count) for count in range(1, 33)
    ]
