"""Three positions of a token are facts of its row."""

from __future__ import annotations

import numpy as np

from zmqengine.engine.interface import RowImage, RowRequest
from zmqengine.engine.models.positions import axes_of
from zmqengine.engine.row import Row

TOKEN = 10


def row_of(prompt: list[int], *images: RowImage, emitted: tuple[int, ...] = ()) -> Row:
    """A row of a model whose cells have two patches a side."""
    return Row(RowRequest(0, prompt, 20, emitted=list(emitted), images=list(images)), 90, 500, TOKEN, 2)


def test_text_goes_on_behind_the_longer_side_of_an_image() -> None:
    """An image of 2 x 3 cells takes three positions of the row, and its tokens stand in rows and columns."""
    image = RowImage(b"h", 2, 6, [(4, 6)], b"")
    row = row_of([1, 2, *[TOKEN] * 6, 3, 4], image)
    assert row.positions is not None
    assert row.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert row.shift == 6 + 1 - 10


def test_a_resumed_row_has_the_positions_that_it_had() -> None:
    """Tokens that were made stand behind the prompt."""
    image = RowImage(b"h", 1, 2, [(2, 4)], b"")
    before, after = row_of([1, TOKEN, TOKEN, 3], image), row_of([1, TOKEN, TOKEN, 3], image, emitted=(5, 6))
    assert before.positions is not None
    assert after.positions is not None
    assert np.array_equal(before.positions, after.positions[:, :4])
    assert before.shift == after.shift


def test_rows_without_images_have_none() -> None:
    """Their positions follow from the caches."""
    row = row_of([1, 2, 3])
    assert row.positions is None
    assert row.shift == 0


def test_axes_are_in_runs_or_in_turns() -> None:
    """As the sections of the config say."""
    told = {"rope_scaling": {"mrope_section": [3, 2, 1]}}
    assert axes_of(told, is_interleaved=False) == (0, 0, 0, 1, 1, 2)
    assert axes_of(told, is_interleaved=True) == (0, 1, 2, 0, 1, 0)
    assert axes_of({}, is_interleaved=True) is None
