"""The performance sections of two pages are made from kept reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.readme import BEGIN, END, main, rewrite, section, summary
from tests.bench.reports import report_of
from zmqengine.bench.reports.report import save
from zmqengine.bench.targets.target import TargetError

ROOT = Path(__file__).resolve().parents[2]


def test_the_sections_are_rewritten_between_the_markers(tmp_path: Path) -> None:
    """The rest of each page stays, and a second run changes nothing."""
    readme, results = tmp_path / "README.md", tmp_path / "benchmarks"
    results.mkdir()
    pages = (readme, results / "README.md")
    for page in pages:
        page.write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    report = report_of({"ours": [2.0], "theirs": [1.0]}, base="theirs", cases=["1", "4", "8"])
    save(report, results / "users-25m.json")
    chats = {"ours": [300.0], "third": [900.0]}
    save(report_of(chats, base="ours", cases=["1", "4", "8"], scenario="chat"), results / "chat-25m.json")
    arguments = ["--results", str(results), "--readme", str(readme)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    texts = [page.read_text() for page in pages]
    for text in texts:
        assert text.startswith("# before\n")
        assert text.endswith(f"{END}\nafter\n")
        assert "old" not in text
    assert "8 such users on a CPU: ours 300, third 900 (x3.00)." in texts[0]
    assert "| users, 8: tokens/s | 2 (x2.00) | 1 | - |" in texts[1]
    assert "| chat, 1: tokens/s | 300 | - | 900 (x3.00) |" in texts[1]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert [page.read_text() for page in pages] == texts


def test_the_sections_in_the_repository_are_those_of_the_kept_reports() -> None:
    """Nobody edits a figure by hand."""
    results = ROOT / "benchmarks"
    for page, made in ((ROOT / "README.md", summary(results)), (results / "README.md", section(results))):
        assert made in page.read_text()


def test_a_readme_without_markers_is_left_alone() -> None:
    """The error names the two lines it needs."""
    with pytest.raises(TargetError, match="performance: begin"):
        rewrite("# nothing here", f"{BEGIN}\n{END}")
