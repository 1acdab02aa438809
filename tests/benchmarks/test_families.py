"""The table of families: figures of each server, and ours over the better of the others."""

from __future__ import annotations

import msgspec

from benchmarks.families import FAMILIES, OURS, table, with_others
from tests.bench.reports import report_of
from zmqengine.bench.models.model_shapes import SHAPES
from zmqengine.bench.reports.report import BenchReport, Cell

TOKENS = {
    OURS: [300.0, 200.0, 400.0],
    "mlx_lm.server": [100.0, 100.0, 100.0],
    "vllm-mlx": [150.0, 50.0, 80.0],
}


def chats(family: str, ttft_ms: float = 500.0) -> BenchReport:
    report = report_of(TOKENS, cases=["4"], scenario=family)
    waits = [
        Cell(scenario=family, case="4", target=label, round=0, measures={"ttft_p99_ms": ttft_ms * times})
        for times, label in enumerate(TOKENS, start=1)
    ]
    return msgspec.structs.replace(report, cells=[*report.cells, *waits])


def test_a_ratio_is_to_the_better_of_the_others_round_by_round() -> None:
    """2, 2 and 4 times as many tokens, and half of the shorter wait."""
    lines = table(chats("Llama"))
    assert lines[2] == "| Llama | 300, 100, 80 | 2.00 | 500, 1,000, 1,500 | 0.50 |"


def test_families_that_are_not_measured_again_keep_their_figures() -> None:
    """In the order of all."""
    earlier = with_others(chats("LFM2"), chats("Llama"))
    again = with_others(chats("Llama", 40.0), earlier)
    assert again.scenarios() == ["Llama", "LFM2"]
    assert [line.split(" | ")[3] for line in table(again)[2:]] == ["40, 80, 120", "500, 1,000, 1,500"]


def test_every_family_has_a_shape() -> None:
    """Which `zmqengine bench model` makes."""
    assert set(FAMILIES.values()) <= set(SHAPES)
