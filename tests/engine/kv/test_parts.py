"""Rows that leave a batch together are copied out of it together, and what is kept of each is the same."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import Run, finish, greedy, make_engine, step
from zmqengine.engine import kv
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.grouped_copies import group_rows
from zmqengine.engine.kv.layout import Layout

LENGTHS = (30, 64, 17, 41, 64, 22, 50, 33)


def operations(*arrays: Any) -> int:
    """Operations in the graph of these arrays."""
    text: Any = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def batch(model):
    """Caches of rows that have read texts of unlike lengths, and of each of them alone."""
    alone = []
    for row, length in enumerate(LENGTHS):
        caches = kv.new_caches(model)
        kv.prefill_row(model, caches, [1 + (row * 37 + place * 11) % 250 for place in range(length)])
        alone.append(caches)
    merged = kv.KVBatch.merge(alone, LENGTHS)
    mx.eval(kv.arrays(merged.caches))
    return merged, alone


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4], [0, 3, 4, 7], [1, 6]])
def test_what_is_taken_of_rows_together_is_what_is_taken_of_each(model, places):
    """All rows, neighbours and scattered ones, from their beginning and from the middle."""
    merged, alone = batch(model)
    layout = kv.BlockLayout(alone[0])
    sources = merged.leaving(places)
    assert list(sources) == places
    assert all(isinstance(source, kv.BatchRow) and source.part for source in sources.values())
    for place, source in sources.items():
        held = LENGTHS[place]
        for start in (0, 16):
            taken = layout.take(source, start, [held])
            wanted = layout.take(alone[place], start, [held])
            for one, other in zip(taken[0], wanted[0], strict=True):
                np.testing.assert_array_equal(np.array(one), np.array(other))


def test_taking_rows_together_is_less_work(model):
    """A few operations for each layer, and two for each row."""
    merged, alone = batch(model)
    layout, counts = kv.BlockLayout(alone[0]), []
    for sources in (map(merged.row, range(8)), merged.leaving(range(8)).values()):
        taken = [layout.take(source, 0, [length])[0] for source, length in zip(sources, LENGTHS, strict=True)]
        counts.append(operations(*[array for arrays in taken for array in arrays]))
    assert counts[1] * 2 <= counts[0]


def test_long_rows_are_taken_alone_and_many_short_ones_in_parts():
    """What is copied is held twice for a moment, so it is not much at a time."""
    ones = Layout(kv.PLAIN, [1, 1, 1, 1])
    assert group_rows([0, 1], Layout(kv.PLAIN, [1500, 1500])) == {0: None, 1: None}
    assert group_rows([3], ones) == {3: None}
    assert group_rows([], ones) == {}
    parts = group_rows(range(40), Layout(kv.PLAIN, [100] * 40))
    assert [parts[place] is parts[0] for place in range(40)] == [True] * 20 + [False] * 20
    mixed = group_rows([0, 1, 2, 3], Layout(kv.PLAIN, [90, 1900, 80, 70]))
    assert [place for place, part in mixed.items() if part is not None] == [2, 3]


def test_rows_that_end_in_the_same_step_are_found_again(model):
    """Among others that go on; what follows their texts is what follows them in an engine that keeps nothing."""
    engine, run = make_engine(model, rows_max=12), Run()
    prompts = [[1 + (row * 37 + place * 11) % 250 for place in range(40 + row)] for row in range(12)]
    limits = [6 if row % 3 else 14 for row in range(12)]
    engine.insert([RowRequest(row, prompt, limits[row]) for row, prompt in enumerate(prompts)])
    while not all(map(run.ended, range(12))):
        step(engine, run)
    for row, prompt in enumerate(prompts):
        longer = [*prompt, *run.ids(row), 7, 8, 9]
        engine.insert([RowRequest(100 + row, longer, 4)])
        after = finish(engine)
        assert after.cached(100 + row) >= len(prompt) + limits[row] - 1
        assert after.ids(100 + row) == greedy(model, longer, 4)
