"""`bench saving`: every round writes what it has read, and says how fast rows decode with it and without."""

from __future__ import annotations

import pytest

from benchmarks.saving import ALONE, SAVING, SavingOptions, SavingPlan, saving
from zmqengine.bench.reports.report import Rounds


@pytest.mark.weekly
def test_a_round_writes_what_it_has_read_while_rows_decode() -> None:
    """On pico, small."""
    sizes = SavingOptions(rows=2, round_bytes=1 << 20, read_tokens=128, steps_min=20)
    report = saving(SavingPlan(options=sizes, rounds=2, seed=1), lambda text: None)
    (case,) = report.cases("saving")
    figures = Rounds(report)
    for target in (ALONE, SAVING):
        rate = figures.figure("saving", case, target, "tokens_per_s")
        assert rate is not None
        assert rate.least > 0
    written = figures.figure("saving", case, SAVING, "written_bytes")
    assert written is not None
    assert written.least >= 0.9 * sizes.round_bytes
