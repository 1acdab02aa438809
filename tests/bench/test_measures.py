"""The arithmetic of figures, on records with known times."""

from __future__ import annotations

import pytest

from zmqengine.bench.load.measures import (
    kind_of,
    longest_silence_ms,
    spread,
    summarise,
    token_gaps_ms,
    tpot_ms,
    ttft_ms,
)
from zmqengine.bench.targets.records import Arrival, RequestRecord


def record(
    *arrivals: tuple[float, int], started_s: float = 10.0, ended_s: float = 20.0, **fields: object
) -> RequestRecord:
    return RequestRecord(
        started_s=started_s,
        ended_s=ended_s,
        arrivals=[Arrival(*arrival) for arrival in arrivals],
        **fields,  # type: ignore[arg-type]
    )


def test_ttft_is_from_sending_to_the_first_chunk_that_holds_a_token() -> None:
    """A chunk without a token, such as one that only names a role, does not count."""
    assert ttft_ms(record((10.5, 0), (11.25, 1), (12.0, 1))) == 1250.0
    assert ttft_ms(record()) is None


def test_gaps_are_between_neighbouring_tokens() -> None:
    """n tokens have n - 1 gaps."""
    assert token_gaps_ms(record((11.0, 1), (11.5, 1), (12.5, 1))) == [500.0, 1000.0]


def test_tokens_read_together_have_no_gap_between_them() -> None:
    """Several tokens in one chunk: the first of them has the gap, the others came with it."""
    grouped = record((11.0, 2), (12.0, 3))
    assert token_gaps_ms(grouped) == [0.0, 1000.0, 0.0, 0.0]
    assert tpot_ms(grouped) == 250.0


def test_tokens_per_second_count_every_token_over_the_whole_time() -> None:
    """From the first request sent to the last answer ended, several tokens in a chunk counted each."""
    measures = summarise(
        [
            record((11.0, 2), (12.0, 2), started_s=10.0, ended_s=12.0, prompt_tokens=6),
            record((13.0, 1), (14.0, 3), started_s=11.0, ended_s=14.0, prompt_tokens=2),
        ]
    )
    assert measures["tokens"] == 8
    assert measures["wall_s"] == 4.0
    assert measures["tokens_per_s"] == 2.0
    assert measures["prompt_tokens_per_s"] == 2.0
    assert measures["tokens_per_chunk"] == 2.0
    assert measures["ttft_min_ms"] == 1000.0
    assert measures["ttft_max_ms"] == 2000.0
    assert measures["e2e_p50_ms"] == 2500.0


def test_percentiles_are_the_librarys_linear_ones() -> None:
    """p90 of 0 to 100 in steps of 10 is 90, p99 lies between the last two."""
    measures = spread("x", [float(value) for value in range(0, 101, 10)])
    assert measures == pytest.approx(
        {"x_min_ms": 0, "x_p50_ms": 50, "x_p90_ms": 90, "x_p99_ms": 99, "x_max_ms": 100}
    )


def test_errors_and_cancelled_requests_are_not_completed() -> None:
    """Their tokens count, their end-to-end time does not."""
    measures = summarise(
        [
            record((11.0, 1), error="http 500"),
            record((11.0, 1), cancelled=True),
            record((11.0, 1), ended_s=12.0),
        ]
    )
    assert (measures["requests"], measures["completed"], measures["errors"]) == (3, 1, 1)
    assert measures["tokens"] == 3
    assert measures["e2e_max_ms"] == 2000.0


def test_nothing_is_made_up_when_nothing_arrived() -> None:
    """Requests that all failed have no latency."""
    measures = summarise([record(error="refused", ended_s=10.5)])
    assert measures["tokens_per_s"] == 0
    assert not [name for name in measures if name.startswith(("ttft", "itl", "tpot", "e2e"))]
    assert summarise([]) == {}


def test_silence_counts_every_gap_that_overlaps_the_window() -> None:
    """A gap that began before the window or ends after it is as long as it is."""
    stream = record((10.0, 1), (11.0, 1), (15.0, 1), (15.5, 1), (19.5, 1))
    assert longest_silence_ms(stream, from_s=12.0, to_s=14.0) == 4000.0
    assert longest_silence_ms(stream, from_s=15.1, to_s=15.4) == 500.0
    assert longest_silence_ms(record((10.0, 1)), 0.0, 99.0) is None


@pytest.mark.parametrize(
    ("name", "better"),
    [("tokens_per_s", "higher"), ("ttft_p50_ms", "lower"), ("completed", "higher"), ("requests", "")],
)
def test_every_figure_knows_which_direction_is_good(name: str, better: str) -> None:
    """Times are better short; counts of work are neither."""
    assert kind_of(name).better == better
