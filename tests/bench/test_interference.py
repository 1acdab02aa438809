"""The figures of a long prompt beside decoding streams, from known times."""

from __future__ import annotations

from zmqengine.bench.scenarios.interference import figures
from zmqengine.bench.targets.records import Arrival, RequestRecord


def stream(*times_s: float) -> RequestRecord:
    return RequestRecord(
        started_s=0, ended_s=20, arrivals=[Arrival(at_s, 1) for at_s in times_s], cancelled=True
    )


def test_gaps_before_and_while_the_long_prompt_is_read_are_told_apart() -> None:
    """It is sent at 3 s, its first token comes at 9 s; what happens later is nobody's fault."""
    long = RequestRecord(
        started_s=3,
        ended_s=12,
        arrivals=[Arrival(9.0, 1), Arrival(12.0, 1)],
        prompt_tokens=4096,
        finish="length",
    )
    measures = figures([stream(1, 2, 3, 8, 9, 19), stream(1, 2, 3.5, 7, 8)], long)
    assert measures["itl_before_p50_ms"] == 1000
    assert measures["silence_max_ms"] == 5000
    assert measures["ttft_long_ms"] == 6000
    assert (measures["completed"], measures["errors"], measures["requests"]) == (1, 0, 3)


def test_a_long_prompt_that_failed_has_no_ttft() -> None:
    """It counts as an error."""
    measures = figures([stream(1, 2, 3, 4)], RequestRecord(started_s=2.5, ended_s=3, error="http 400"))
    assert "ttft_long_ms" not in measures
    assert (measures["completed"], measures["errors"]) == (0, 1)
