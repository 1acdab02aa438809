"""What widths cost before anybody has asked for anything: wide steps of a model, timed against narrow ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.backend import on_gpu
from zmqengine.engine.drafts.step_costs import WAITED, StepCosts, started_ahead
from zmqengine.engine.row import Caches, Pending
from zmqengine.engine.window import Coming, Draft, Window

_SECONDS_MAX = 1.5
_TRIES = 5
_AHEAD_STEPS = 4
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def measure_widths(
    model: Any,
    costs: StepCosts,
    rows_max: int,
    positions_max: int,
    widths: Sequence[int],
    *,
    runs_ahead: bool = False,
) -> None:
    """Time each of `widths` for one row, for the most rows, and in between, for a second or two in all.

    A step without drafts is started before the step before has ended; one with drafts is started afterwards, and where
    a policy `runs_ahead` before as well.
    The model's caches must be able to go back. What is not measured is taken to be like what is. A GPU has then seen
    such steps with gaps as well: kernels that are compiled when they are first used take seconds.
    """
    first = kv.new_caches(model)
    mx.eval(kv.read_alone(model, first, _PROMPT))
    counts = sorted({1, min(8, rows_max), rows_max})
    for rows in counts:
        wide = [width for width in widths if rows * width <= positions_max]
        steps = _Steps(model, kv.merge([first] * rows), rows)
        steps.time(costs, wide, wide if runs_ahead else [], _SECONDS_MAX / len(counts))


class _Steps:
    """Steps of some rows, which go back to where they were."""

    def __init__(self, model: Any, caches: Caches, rows: int) -> None:
        self._model = model
        self._caches = caches
        self._rows = rows
        self._held = [len(_PROMPT)] * rows

    def time(
        self, costs: StepCosts, widths: Sequence[int], widths_ahead: Sequence[int], seconds: float
    ) -> None:
        """Those without drafts of rows as long as each other, the others of rows with gaps, as they are in use."""
        even = [len(_PROMPT)] * self._rows
        best_s = self._best({1: self.ahead, WAITED: partial(self.waited, 1)}, even, seconds / 4)
        kinds: dict[int, Callable[[], None]] = {width: partial(self.waited, width) for width in widths}
        kinds |= {started_ahead(width): partial(self.windows_ahead, width) for width in widths_ahead}
        uneven = [len(_PROMPT) + (row > 0) for row in range(self._rows)]
        best_s |= self._best(kinds, uneven, seconds * 3 / 4 * (_AHEAD_STEPS if widths_ahead else 1))
        for width in (1, *map(started_ahead, widths_ahead)):
            best_s[width] /= _AHEAD_STEPS
        timed = {width: its_s for width, its_s in best_s.items() if its_s < math.inf}
        if 1 in timed:
            costs.measured(self._rows, timed)
        if on_gpu():
            self.waited(1)

    def _best(
        self, kinds: Mapping[int, Callable[[], None]], held: list[int], seconds: float
    ) -> dict[int, float]:
        """The least of a few times of each kind, which are taken in turns: what holds one up may hold up another."""
        until_s = time.perf_counter() + seconds
        best_s = dict.fromkeys(kinds, math.inf)
        # The first of a kind compiles.
        for number in range(1 + _TRIES):
            for kind, steps in kinds.items():
                started_s = time.perf_counter()
                if started_s > until_s:
                    return best_s
                steps()
                if number:
                    best_s[kind] = min(best_s[kind], time.perf_counter() - started_s)
                self._go_back(held)
        return best_s

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

    def windows_ahead(self, width: int) -> None:
        """The same with drafts of which some are right."""
        known = [Draft(_PROMPT, "")] * self._rows
        first = mx.array([_PROMPT[0]] * self._rows, dtype=mx.uint32)
        coming, waiting = Coming(mx.ones(self._rows, mx.int32), 1, first), None
        for _ in range(_AHEAD_STEPS):
            window = Window.ahead(coming, known, width)
            tokens = self._step(window.inputs, is_idle=False, pending=window.pending)
            coming = window.coming(tokens)
            kv.start(coming.counts, coming.last, tokens)
            if waiting is not None:
                self._keep(waiting, width, after=width)
            waiting = coming.counts
        assert waiting is not None
        self._keep(waiting, width)
        kv.close_gaps(self._caches, self._held)

    def _keep(self, counts: mx.array, width: int, after: int = 0) -> None:
        kept: Any = counts.tolist()
        self._held = [held - width + count for held, count in zip(self._held, kept, strict=True)]
        kv.go_back(self._caches, [width - count for count in kept], self._held, after=after)

    def waited(self, width: int) -> None:
        """A step of that width from tokens that are known."""
        self._step(mx.array([_PROMPT[:width]] * self._rows, dtype=mx.uint32), is_idle=True).tolist()

    def _step(self, inputs: mx.array, *, is_idle: bool, pending: Pending | None = None) -> mx.array:
        idle = on_gpu() and is_idle
        kv.make_room(self._caches, inputs.shape[1], self._held, idle=idle, pending=pending)
        self._held = [held + inputs.shape[1] for held in self._held]
        return mx.argmax(self._model(inputs, cache=self._caches), axis=-1)

    def _go_back(self, held: list[int]) -> None:
        counts = [before - after for before, after in zip(self._held, held, strict=True)]
        self._held = held
        kv.go_back(self._caches, counts, held)
