"""What widths cost before anybody has asked for anything: wide steps of a model, timed against narrow ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.backend import on_gpu
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
    The model's caches must be able to go back. What is not measured is taken to be like what is. A GPU has then seen
    such steps with gaps as well: kernels that are compiled when they are first used take seconds.
    """
    first = kv.new_caches(model)
    mx.eval(kv.read_alone(model, first, _PROMPT))
    counts = sorted({1, min(8, rows_max), rows_max})
    for rows in counts:
        until_s = time.perf_counter() + _SECONDS_MAX / len(counts)
        wide = [width for width in widths if rows * width <= positions_max]
        steps = _Steps(model, kv.merge([first] * rows), rows)
        steps.time(costs, wide, until_s)
        if on_gpu():
            steps.prepare(wide)


class _Steps:
    """Steps of some rows, which go back to where they were."""

    def __init__(self, model: Any, caches: Caches, rows: int) -> None:
        self._model = model
        self._caches = caches
        self._rows = rows
        self._held = [len(_PROMPT)] * rows

    def time(self, costs: StepCosts, widths: Sequence[int], until_s: float) -> None:
        """The least of a few times of each kind, which are taken in turns: what holds one up may hold up another."""
        kinds: dict[int, Callable[[], None]] = {1: self.ahead, WAITED: partial(self.waited, 1)}
        kinds |= {width: partial(self.waited, width) for width in widths}
        best_s = dict.fromkeys(kinds, math.inf)
        # The first of a kind compiles.
        for number in range(1 + _TRIES):
            for width, steps in kinds.items():
                started_s = time.perf_counter()
                if started_s > until_s:
                    break
                steps()
                if number:
                    best_s[width] = min(best_s[width], time.perf_counter() - started_s)
                self._go_back([len(_PROMPT)] * self._rows)
        best_s[1] /= _AHEAD_STEPS
        timed = {width: seconds for width, seconds in best_s.items() if seconds < math.inf}
        if 1 in timed:
            costs.measured(self._rows, timed)

    def prepare(self, widths: Sequence[int]) -> None:
        """A step of each width with gaps, where there can be some."""
        if self._rows > 1:
            held = [len(_PROMPT) + (row > 0) for row in range(self._rows)]
            for width in (1, *widths):
                self.waited(width)
                self._go_back(held)

    def ahead(self) -> None:
        """Steps of width 1, each of which starts before the one before has ended."""
        tokens, waiting = mx.array([_PROMPT[0]] * self._rows, dtype=mx.uint32), None
        for _ in range(_AHEAD_STEPS):
            tokens = self._step(tokens[:, None], is_idle=False)[:, -1]
            kv.start(tokens)
            if waiting is not None:
                waiting.tolist()
            waiting = tokens
        tokens.tolist()

    def waited(self, width: int) -> None:
        """A step of that width from tokens that are known."""
        self._step(mx.array([_PROMPT[:width]] * self._rows, dtype=mx.uint32), is_idle=True).tolist()

    def _step(self, inputs: mx.array, *, is_idle: bool) -> mx.array:
        kv.make_room(self._caches, inputs.shape[1], self._held, idle=on_gpu() and is_idle)
        self._held = [held + inputs.shape[1] for held in self._held]
        return mx.argmax(self._model(inputs, cache=self._caches), axis=-1)

    def _go_back(self, held: list[int]) -> None:
        counts = [before - after for before, after in zip(self._held, held, strict=True)]
        self._held = held
        kv.go_back(self._caches, counts, held)
