"""Measured rates of service, and what is promised from them."""

from __future__ import annotations

import pytest

from zmqengine.worker.service_order import PREFILL_COST
from zmqengine.worker.service_rates import ServiceRates
from zmqengine.worker.ticket import Ticket


def ticket(deadline_s: float | None = None, *, prompt: int = 1000, max_tokens: int | None = 100) -> Ticket:
    return Ticket("a", 1.0, 0, prompt, max_tokens, 0, 0.0, deadline_s)


def measured() -> ServiceRates:
    """4 rows: a step takes 20 ms, a prompt token 1 ms, an answer has 50 tokens; one ends each second."""
    rates = ServiceRates()
    for _ in range(400):
        for _ in range(12):
            rates.note_step(0, 4, 0.02)
        rates.note_step(240, 4, 0.02 + 0.24)
        rates.note_step(500, 0, 0.5)
        rates.note_end(50)
    return rates


def test_rates_are_those_of_the_steps() -> None:
    """A step that reads and makes tokens is split by what a step of decoding takes."""
    rates = measured()
    assert rates.prefill_tokens_per_s == pytest.approx(1000, rel=0.01)
    assert rates.decode_tokens_per_s == pytest.approx(200, rel=0.01)
    assert rates.row_tokens_per_s == pytest.approx(50, rel=0.01)
    assert rates.endings_per_s == pytest.approx(1, rel=0.05)
    assert rates.prefill_cost == pytest.approx(0.2, rel=0.02)


def test_rates_follow_a_change() -> None:
    """After a minute at half the pace the old pace has faded to an eighth."""
    rates = measured()
    for _ in range(1_500):
        rates.note_step(0, 4, 0.04)
    assert rates.row_tokens_per_s == pytest.approx(25, rel=0.2)


def test_nothing_is_refused_before_anything_is_known() -> None:
    """No data is no reason; the cost of a prompt token is a usual one, the hint a second."""
    rates = ServiceRates()
    assert rates.prefill_cost == PREFILL_COST
    assert rates.expected_wait_s(1000) is None
    assert rates.retry_after_ms() == 1000
    assert rates.meets_deadline(ticket(0.001), 0.0, places_ahead=1000).met
    rates.note_step(10, 1, 0.0)
    rates.note_step(100, 1, 0.01)
    assert rates.prefill_tokens_per_s is None, "a step that compiles says nothing about the next one"
    assert rates.meets_deadline(ticket(0.001), 0.0, places_ahead=1000).met


def test_a_hopeless_deadline_is_told_with_the_estimate() -> None:
    """1000 tokens to read at 1000/s, then the usual 50 at 50/s, after 3 endings at 1/s: 5 s."""
    rates = measured()
    estimate = rates.meets_deadline(ticket(103.0), 100.0, places_ahead=2)
    assert not estimate.met
    assert estimate.total_s == pytest.approx(5, rel=0.05)
    assert "about 5.0 s" in str(estimate)
    assert "has 3.0 s" in str(estimate)
    assert rates.meets_deadline(ticket(104.0), 100.0, places_ahead=2).met, "estimates are rough"
    assert rates.meets_deadline(ticket(103.0), 100.0, places_ahead=2, row_is_free=True).met
    assert rates.meets_deadline(ticket(None), 100.0, places_ahead=10**6).met
    assert not rates.meets_deadline(ticket(99.0), 100.0, places_ahead=0, row_is_free=True).met
    assert rates.meets_deadline(ticket(101.0, prompt=10, max_tokens=5), 100.0, places_ahead=0).met


def test_the_hint_is_when_a_place_comes_free() -> None:
    """By what has ended; while nothing has, by how long it has taken so far."""
    assert measured().retry_after_ms() == pytest.approx(1000, rel=0.05)
    assert measured().retry_after_ms(5) == pytest.approx(5000, rel=0.05)
    assert measured().retry_after_ms(10**6) == 60_000
    slow = ServiceRates()
    for _ in range(100):
        slow.note_step(0, 1, 0.025)
    assert slow.retry_after_ms() == pytest.approx(2500, rel=0.1)
    quick = ServiceRates()
    for _ in range(100):
        quick.note_step(0, 1, 0.01)
        quick.note_end(1)
    assert quick.retry_after_ms() == 100
