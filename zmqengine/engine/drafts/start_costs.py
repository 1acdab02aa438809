"""What widths cost before anybody has asked for anything: wide steps of a model, timed against narrow ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.drafts.step_costs import WAITED, StepCosts
from zmqengine.engine.row import Caches

_SECONDS_MAX = 1.0
_TRIES = 5
_AHEAD_STEPS = 4
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def measure_widths(
    model: Any, costs: StepCosts, rows_max: int, positions_max: int, widths: Sequence[int]
) -> None:
    """Time each of `widths` for one row, for the most rows, and in between, for about a second in all.

    A step without drafts is started before the step before has ended; one with drafts is started afterwards.
    The model's caches must be able to go back. What is not measured is taken to be like what is.
    """
    first = kv.new_caches(model)
    mx.eval(kv.read_alone(model, first, _PROMPT))
    counts = sorted({1, min(8, rows_max), rows_max})
    for rows in counts:
        until_s = time.perf_counter() + _SECONDS_MAX / len(counts)
        wide = [width for width in widths if rows * width <= positions_max]
        _Steps(model, kv.merge([first] * rows), rows).time(costs, wide, until_s)


class _Steps:
    """Steps of some rows, each of which goes back to where it was."""

    def __init__(self, model: Any, caches: Caches, rows: int) -> None:
        self._model = model
        self._caches = caches
        self._rows = rows

    def time(self, costs: StepCosts, widths: Sequence[int], until_s: float) -> None:
        """The least of a few times of each kind, which are taken in turns: what holds one up may hold up another."""
        kinds: dict[int, Callable[[], int]] = {1: self.ahead, WAITED: partial(self.waited, 1)}
        kinds |= {width: partial(self.waited, width) for width in widths}
        best_s = dict.fromkeys(kinds, math.inf)
        # The first of a kind compiles.
        for number in range(1 + _TRIES):
            for width, steps in kinds.items():
                started_s = time.perf_counter()
                if started_s > until_s:
                    break
                read = steps()
                if number:
                    best_s[width] = min(best_s[width], time.perf_counter() - started_s)
                kv.go_back(self._caches, [read] * self._rows, [len(_PROMPT)] * self._rows)
        best_s[1] /= _AHEAD_STEPS
        timed = {width: seconds for width, seconds in best_s.items() if seconds < math.inf}
        if 1 in timed:
            costs.measured(self._rows, timed)

    def ahead(self) -> int:
        """Steps of width 1, each of which starts before the one before has ended."""
        tokens, waiting = mx.array([_PROMPT[0]] * self._rows, dtype=mx.uint32), None
        for _ in range(_AHEAD_STEPS):
            tokens = mx.argmax(self._model(tokens[:, None], cache=self._caches)[:, -1], axis=-1)
            kv.start(tokens)
            if waiting is not None:
                waiting.tolist()
            waiting = tokens
        tokens.tolist()
        return _AHEAD_STEPS

    def waited(self, width: int) -> int:
        """A step of that width from tokens that are known."""
        inputs = mx.array([_PROMPT[:width]] * self._rows, dtype=mx.uint32)
        mx.argmax(self._model(inputs, cache=self._caches), axis=-1).tolist()
        return width
