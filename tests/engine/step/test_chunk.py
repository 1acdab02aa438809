"""The tokens of each prompt in a step: bounded, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine.engine.step.chunk import share_out

LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 5000))


@given(remaining=st.lists(LENGTHS, max_size=33), tokens_max=st.integers(1, 2048))
def test_a_step_is_bounded_and_moves_on(remaining: list[int], tokens_max: int) -> None:
    """Whatever waits: never more than the bound or than is left of a prompt, and something while anything is left."""
    shares = share_out(remaining, tokens_max)
    assert len(shares) == len(remaining)
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    assert sum(shares) <= tokens_max
    assert sum(shares) > 0 or not any(remaining)


@given(remaining=st.lists(LENGTHS, min_size=1, max_size=33), tokens_max=st.integers(1, 2048))
def test_room_is_left_only_for_prompts_that_fit_into_one_step(remaining: list[int], tokens_max: int) -> None:
    """A whole prompt waits for a step of its own; what no other takes is the oldest one's."""
    shares = share_out(remaining, tokens_max)
    if sum(shares) < min(tokens_max, sum(remaining)):
        assert shares[0] == remaining[0]
        left = tokens_max - sum(shares)
        shortest = min(whole for whole, share in zip(remaining, shares, strict=True) if share < whole)
        assert shortest <= tokens_max or left < 16


@given(
    arrivals=st.lists(st.lists(st.integers(1, 300), max_size=4), min_size=1, max_size=30),
    long=st.integers(1000, 4000),
    tokens_max=st.integers(1, 256),
)
def test_the_oldest_prompt_always_ends(arrivals: list[list[int]], long: int, tokens_max: int) -> None:
    """It gets at least a quarter of each step, however many shorter ones arrive."""
    waiting = [long]
    steps = 0
    while waiting[0]:
        steps += 1
        waiting += arrivals[steps % len(arrivals)]
        shares = share_out(waiting, tokens_max)
        assert shares[0] >= min(waiting[0], max(1, tokens_max // 4))
        waiting = [left - share for left, share in zip(waiting, shares, strict=True)]
        waiting = [waiting[0], *(left for left in waiting[1:33] if left)]


@pytest.mark.parametrize(
    ("remaining", "tokens_max", "shares"),
    [
        # Short ones go first; the oldest gets a quarter, and what they leave.
        ([1000, 30, 20], 100, [50, 30, 20]),
        ([1000, 90, 20], 100, [80, 0, 20]),
        ([1000, 40, 40, 40], 100, [25 + 35, 40, 0, 0]),
        # All of a step for whoever is alone.
        ([1000], 100, [100]),
        ([7], 100, [7]),
        # A slice of a long prompt, where the oldest has ended.
        ([20, 500], 100, [20, 80]),
        # But not of one that fits into the next step, and no small slice.
        ([20, 90], 100, [20, 0]),
        ([90, 500], 100, [90, 0]),
        ([], 100, []),
        ([0, 0], 100, [0, 0]),
        ([5, 5], 1, [1, 0]),
    ],
)
def test_prompts_share_a_step(remaining: list[int], tokens_max: int, shares: list[int]) -> None:
    """By their lengths and their age."""
    assert share_out(remaining, tokens_max) == shares
