"""What widths cost before anybody has asked for anything: wide steps of a model, timed against narrow ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.drafts.step_costs import StepCosts
from zmqengine.engine.row import Caches

_SECONDS_MAX = 1.0
_TRIES = 3
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def measure_widths(
    model: Any, costs: StepCosts, rows_max: int, positions_max: int, widths: Sequence[int]
) -> None:
    """Time each of `widths` for one row, for the most rows, and in between, for about a second in all.

    The model's caches must be able to go back. What is not measured is taken to be like what is.
    """
    until_s = time.perf_counter() + _SECONDS_MAX
    first = kv.new_caches(model)
    mx.eval(kv.read_alone(model, first, _PROMPT))
    for rows in sorted({1, min(8, rows_max), rows_max}):
        caches = kv.merge([first] * rows)
        # Twice: the first steps of a number of rows are slow for other reasons.
        narrow_s = min(_time(model, caches, rows, 1), _time(model, caches, rows, 1))
        for width in widths:
            if rows * width > positions_max or time.perf_counter() > until_s:
                break
            costs.measured(rows, width, _time(model, caches, rows, width) / narrow_s)


def _time(model: Any, caches: Caches, rows: int, width: int) -> float:
    inputs = mx.array([_PROMPT[:width]] * rows, dtype=mx.uint32)
    times_s = []
    # The first one compiles.
    for _ in range(1 + _TRIES):
        started_s = time.perf_counter()
        mx.eval(mx.argmax(model(inputs, cache=caches), axis=-1))
        times_s.append(time.perf_counter() - started_s)
        kv.go_back(caches, [width] * rows, [len(_PROMPT)] * rows)
    return min(times_s[1:])
