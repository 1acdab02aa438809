"""`bench speculation` gives two engines the same work a few steps in turns, and counts what each has made."""

from __future__ import annotations

import pytest

from benchmarks.speculation.turns import SpeculationPlan, speculation
from benchmarks.speculation.work import SpeculationOptions


@pytest.mark.weekly
def test_an_engine_with_drafts_and_one_without_make_the_same_tokens_in_turns():
    options = SpeculationOptions(streams=(2,), echo_words=60, new_tokens=45)
    plan = SpeculationPlan(options=options, work=("echo", "new text", "sampled text"), rounds=1)
    report = speculation(plan, lambda _: None)
    cells = {(cell.scenario, cell.case, cell.target): cell.measures for cell in report.cells}
    assert len(cells) == 3 * 2
    assert not any("differed" in note for note in report.notes)
    for (scenario, _, target), measures in cells.items():
        assert measures["tokens_per_s"] > 0
        assert measures["full_tokens_per_s"] > 0
        if target == "off":
            # The last step of all comes after the last token has been started.
            assert 1.0 <= measures["steps_per_token"] <= 1.05
        if scenario == "new text":
            assert "accepted_share" not in measures
