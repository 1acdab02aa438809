"""Chat traffic: unlike requests, the same for the same seed, and figures of one minute."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from zmqengine.bench.load.prompts import COMMON_WORDS, Prompts
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.chat import conversation, within
from zmqengine.bench.targets.records import Arrival, RequestRecord


def requests_of(seed: int, count: int = 400) -> list[tuple[int, int, float]]:
    """Prompt words, answer tokens and temperature of one user's requests."""
    chance, prompts = random.Random(seed), Prompts(COMMON_WORDS, None, str(seed))
    made = islice(conversation(ScenarioOptions(), chance, prompts, "shared "), count)
    return [(len(one.text.split()) - 1, one.max_tokens, one.temperature) for one in made]


def test_requests_have_the_stated_distributions() -> None:
    """A median prompt of 400 tokens, some ten times as long as others, answers from 24 to 320 tokens."""
    made = requests_of(1)
    lengths = sorted(length for length, _, _ in made)
    assert 300 < lengths[len(lengths) // 2] < 520
    assert lengths[len(lengths) * 9 // 10] > 6 * lengths[len(lengths) // 10]
    assert max(lengths) <= 3000
    assert {24 <= answer <= 320 for _, answer, _ in made} == {True}
    assert {temperature for _, _, temperature in made} == {0.0, 0.7}


def test_a_seed_makes_the_same_requests() -> None:
    """Every target gets the same traffic; another user has other requests."""
    assert requests_of(1, 20) == requests_of(1, 20)
    assert requests_of(1, 20) != requests_of(2, 20)


def test_figures_are_those_of_the_minute() -> None:
    """Tokens count when they arrive, first tokens and gaps by when their request was sent."""
    record = RequestRecord(
        started_s=9.0, ended_s=14.0, arrivals=[Arrival(9.5, 2), Arrival(10.5, 3), Arrival(13.5, 1)]
    )
    later = RequestRecord(started_s=10.2, ended_s=12.0, arrivals=[Arrival(10.4, 1), Arrival(11.0, 1)])
    figures = within([record, later], 10.0, 12.0)
    assert figures["tokens_per_s"] == 2.5
    assert figures["requests"] == 1
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["itl_max_ms"] == pytest.approx(600)
    assert figures["silence_max_ms"] == pytest.approx(3000)
