"""The line that says how far something is."""

from __future__ import annotations

import pytest

from zmqengine.cli.progress_line import ProgressLine, bar


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (0.0, "[                        ]   0 %"),
        (0.5, "[############            ]  50 %"),
        (1.0, "[########################] 100 %"),
        (7.0, "[########################] 100 %"),
    ],
)
def test_the_bar_is_as_long_as_what_is_done(fraction: float, shown: str) -> None:
    """Of the same width always."""
    assert bar(fraction) == shown


def test_where_nobody_looks_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Logs and pipes get no half lines."""
    with ProgressLine(lambda: "half") as line:
        assert line._thread is None
    assert capsys.readouterr() == ("", "")
