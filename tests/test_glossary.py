"""docs/glossary.md names words that the code uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = re.findall(
    r"^\| ([a-z, -]+) \| .+ \| `(.+)` \|$", (ROOT / "docs/glossary.md").read_text("utf-8"), flags=re.MULTILINE
)


@pytest.mark.parametrize(("words", "file"), ROWS, ids=[words for words, _ in ROWS])
def test_a_word_is_used_where_it_is_at_home(words: str, file: str) -> None:
    """A word that is gone from there was renamed: the page and whoever else says it follow."""
    text = re.sub(r"\s+", " ", (ROOT / file).read_text("utf-8"))
    for word in words.split(", "):
        assert re.search(rf"\b_?{word}", text, flags=re.IGNORECASE), word


def test_no_word_stands_twice() -> None:
    """One word for one thing."""
    words = [words for words, _ in ROWS]
    assert len(words) > 30
    assert len(words) == len(set(words))
