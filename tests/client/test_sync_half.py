"""The threaded half of the client is the asyncio half, rewritten."""

from __future__ import annotations

import pytest

from tools import sync_half


@pytest.mark.parametrize("name", sync_half.FILES)
def test_it_is_current(name: str) -> None:
    """Whoever changes `aio` runs `python -m tools`."""
    written = (sync_half.CLIENT / "sync" / name).read_text("utf-8")
    assert written == sync_half.made(name), "run: python -m tools"


def test_every_sentence_of_its_table_is_used() -> None:
    """A sentence that was changed in `aio` and not in the table would be wrong in `sync`."""
    assert sync_half.unused_sentences() == set()


def test_what_is_not_made_stands_on_both_sides() -> None:
    """A file that is only on one side was forgotten, or is one of the two drivers."""
    sides = [
        {path.name for path in (sync_half.CLIENT / side).glob("*.py")} - {"loop_driver.py", "io_thread.py"}
        for side in ("aio", "sync")
    ]
    assert sides[0] == sides[1]
