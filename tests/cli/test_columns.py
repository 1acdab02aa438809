"""Texts side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine.cli.commands.demo.two_streams import Columns, side_by_side


def test_texts_stand_beside_each_other() -> None:
    """Each wrapped in its own column."""
    assert side_by_side(["one two three", "four"], 13) == ["one   | four", "two   |", "three |"]
    assert side_by_side(["one", "four"], 1)[:2] == ["o | f", "n | o"], "a terminal may have any width"


@given(st.lists(st.text(), min_size=1, max_size=3), st.integers(min_value=20, max_value=120))
def test_no_line_is_wider_than_the_terminal(texts: list[str], width: int) -> None:
    """Or the drawing over what was drawn would miss its lines."""
    assert all(len(line) <= width for line in side_by_side(texts, width))


def test_drawing_again_starts_where_the_last_drawing_did(capsys: pytest.CaptureFixture[str]) -> None:
    """The cursor goes up by as many lines as were drawn."""
    columns = Columns()
    columns.draw(["a\nb\nc", "d"])
    capsys.readouterr()
    columns.draw(["a", "d"])
    assert capsys.readouterr().out.startswith("\x1b[3A")
