"""The size of a prefill chunk follows the time that steps take."""

from __future__ import annotations

import pytest

from zmqengine.engine.pacing import FAST_STEPS, TOKENS_MIN, PrefillPace


@pytest.mark.parametrize("tokens_a_second", [100, 1_000, 2_500, 20_000, 1_000_000])
def test_a_step_comes_to_stay_within_its_time(tokens_a_second: float) -> None:
    """lmstudio #1709, omlx #2031: one next() is bounded in time, on a machine of any speed."""
    pace = PrefillPace(512, 0.2)
    for _ in range(20):
        pace.record(pace.tokens, pace.tokens / tokens_a_second)
    within = int(0.2 * tokens_a_second)
    assert pace.tokens <= max(TOKENS_MIN, within)
    assert pace.tokens >= min(512, max(TOKENS_MIN, within // 4))


def test_one_long_step_costs_only_a_few_smaller_ones() -> None:
    """A step that the system held up halves the chunk once; it grows back."""
    pace = PrefillPace(512, 0.2)
    for _ in range(5):
        pace.record(pace.tokens, 0.01)
    assert pace.tokens == 512
    pace.record(512, 30.0)
    assert pace.tokens == 256
    for _ in range(FAST_STEPS):
        assert pace.tokens == 256
        pace.record(256, 0.01)
    assert pace.tokens == 512


def test_a_short_prompt_says_nothing_about_long_ones() -> None:
    """Only a chunk that was nearly full makes the next one larger."""
    pace = PrefillPace(4096, 0.2)
    start = pace.tokens
    for _ in range(10):
        pace.record(5, 0.001)
    assert pace.tokens == start


def test_no_target_is_no_limit_in_time() -> None:
    """With 0 the chunk is what the option says, whatever it takes."""
    pace = PrefillPace(512, 0)
    pace.record(512, 100.0)
    assert pace.tokens == 512


def test_the_least_chunk_is_within_the_most() -> None:
    """A maximum below the usual minimum holds."""
    pace = PrefillPace(8, 0.2)
    for _ in range(9):
        pace.record(pace.tokens, 10.0)
    assert pace.tokens == 8


def test_what_decoding_takes_is_not_held_against_the_prompts() -> None:
    """A model whose plain step is long still reads prompts in sensible chunks."""
    pace = PrefillPace(512, 0.2)
    for _ in range(10):
        pace.record(0, 0.5)
    for _ in range(20):
        pace.record(pace.tokens, 0.5 + pace.tokens / 2_000)
    assert 200 <= pace.tokens <= 400


def test_a_pace_begins_with_what_was_measured() -> None:
    """On a fast device the first chunk is already long, and streams are not silent for longer than eight steps."""
    pace = PrefillPace(4096, 0.2)
    pace.begin(40_000, 0.005)
    assert pace.tokens == 1600
    for _ in range(9):
        pace.record(pace.tokens, 1.0)
    assert pace.tokens == 400
    pace.begin(1_000, 0.1)
    assert pace.tokens == 200
    pace.forget()
    assert pace.tokens == 256


def test_streams_beside_a_prompt_are_silent_for_a_few_steps() -> None:
    """A machine that steps in 5 ms does not read for 200."""
    pace = PrefillPace(4096, 0.2)
    for _ in range(10):
        pace.record(0, 0.005)
    for _ in range(40):
        pace.record(pace.tokens, 0.005 + pace.tokens / 40_000)
    assert pace.tokens / 40_000 <= 0.04
