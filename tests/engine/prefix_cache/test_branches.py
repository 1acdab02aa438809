"""Positions of checkpoints in a prompt."""

from __future__ import annotations

import pytest

from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS
from zmqengine.engine.prefix_cache.branches import branches


@pytest.mark.parametrize(
    ("begin", "end", "known", "expected"),
    [
        (0, 200, 150, []),
        (0, 1040, 0, [1024]),
        (0, 1030, 0, [960]),
        (0, 1040, 500, [448, 1024]),
        (448, 1040, 500, [1024]),
        (0, 10_000, 0, [4096, 8192, 9984]),
        (8192, 10_000, 8192, [9984]),
    ],
)
def test_it_is_kept_where_prompts_turn_off(begin, end, known, expected):
    """Before the head of the answer, where another prompt went on differently, and now and then in a long one."""
    assert branches(begin, end, known) == expected


def test_there_are_a_few_of_them_however_long_a_prompt_is():
    """Checkpoints are large, so their number is bounded."""
    found = branches(0, 1_000_000, 0)
    assert len(found) <= 9
    assert all(position % BLOCK_TOKENS == 0 for position in found)
