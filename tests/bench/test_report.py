"""Medians, ranges and ratios over rounds, and the file they are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.reports import report_of
from zmqengine.bench.reports.compare import compare, comparison_table
from zmqengine.bench.reports.plot import plot
from zmqengine.bench.reports.report import Rounds, load, save
from zmqengine.bench.reports.tables import preface, tables_of
from zmqengine.bench.targets.target import TargetError

SPEEDS = {"ours": [200.0, 300.0, 240.0], "theirs": [100.0, 200.0, 80.0]}


def test_ratios_are_taken_pair_by_pair() -> None:
    """The median of the ratios of each round, not the ratio of medians: a machine that drifts cancels out."""
    figure = Rounds(report_of(SPEEDS, base="theirs")).figure("users", "8", "ours", "tokens_per_s")
    assert figure is not None
    assert (figure.median, figure.least, figure.greatest) == (240.0, 200.0, 300.0)
    assert figure.ratio == 2.0


def test_a_round_that_one_target_missed_makes_no_ratio() -> None:
    """Only rounds in which both were measured are compared."""
    report = report_of({"ours": [200.0, 300.0], "theirs": [100.0]}, base="theirs")
    figure = Rounds(report).figure("users", "8", "ours", "tokens_per_s")
    assert figure is not None
    assert (figure.rounds, figure.ratio) == (2, 2.0)


def test_the_base_has_no_ratio_to_itself() -> None:
    """And what was not measured has no figure."""
    rounds = Rounds(report_of(SPEEDS, base="theirs"))
    base = rounds.figure("users", "8", "theirs", "tokens_per_s")
    assert base is not None
    assert base.ratio is None
    assert rounds.figure("users", "9", "ours", "tokens_per_s") is None


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Figures are kept to six digits."""
    report = report_of({"ours": [1234.56789]})
    save(report, tmp_path / "deep" / "report.json")
    again = load(tmp_path / "deep" / "report.json")
    assert again.cells[0].measures == {"tokens_per_s": 1234.57}
    assert again.labels() == ["ours"]


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    """By name, on one line."""
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(TargetError, match="is not a report"):
        load(tmp_path / "x.json")


def test_compare_marks_what_is_within_noise() -> None:
    """Ranges that touch may be noise; ranges apart are better or worse, by what the measure means."""
    first = report_of({"ours": [100.0, 120.0]})
    cases = {
        "within noise": [110.0, 150.0],
        "better": [130.0, 150.0],
        "worse": [80.0, 90.0],
        "only once": [500.0],
    }
    for verdict, speeds in cases.items():
        (found,) = compare(first, report_of({"ours": speeds}))
        assert found.verdict == verdict
    (slower,) = compare(
        report_of({"ours": [1.0, 2.0]}, measure="ttft_p50_ms"),
        report_of({"ours": [3.0, 4.0]}, measure="ttft_p50_ms"),
    )
    assert slower.verdict == "worse"


def test_compare_can_match_targets_of_different_names() -> None:
    """Ours in one run against theirs in another."""
    (found,) = compare(report_of({"ours": [10.0]}), report_of({"theirs": [5.0]}), {"ours": "theirs"})
    assert found.ratio == 0.5
    assert list(compare(report_of({"ours": [10.0]}), report_of({"theirs": [5.0]}))) == []
    assert comparison_table(iter([found])).rows == [
        ["users, 8, ours", "tokens/s", "10", "5", "x0.50", "only once"]
    ]


def test_a_table_shows_medians_and_ratios() -> None:
    """One row a target."""
    (table,) = tables_of(report_of(SPEEDS, base="theirs"))
    assert table.rows == [["ours", "240 (x2.00)"], ["theirs", "100"]]


def test_random_weights_are_told_before_any_figure() -> None:
    """Plainly, in every report made with such a model."""
    lines = " ".join(preface(report_of(SPEEDS, random_weights=True)))
    assert "random weights" in lines
    assert "random" not in " ".join(preface(report_of(SPEEDS)))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_report_can_be_drawn(tmp_path: Path, suffix: str) -> None:
    """As PNG or SVG, by the name of the file."""
    picture = tmp_path / f"picture{suffix}"
    plot(report_of(SPEEDS), picture)
    assert picture.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
