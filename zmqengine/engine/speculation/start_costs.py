"""Costs of widths at the start: verify blocks of a model, timed against steps of width 1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.autotune import layers
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.choosing import Choosing
from zmqengine.engine.speculation.step_costs import WAITED, StepCosts
from zmqengine.engine.speculation.verify_block import Choices, Draft, VerifyBlock

_SECONDS_MAX = 1.5
_TRIES = 5
_AHEAD_STEPS = 4
# Attention is computed in several parts from so many tokens on, by kernels of their own.
_LONG_TOKENS = (256, 1024)
# To trace windows of 32 rows and less takes a third of it.
_TRACES_S = 2.0
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def measure_widths(
    model: Any,
    costs: StepCosts,
    rows_max: int,
    positions_max: int,
    widths: Sequence[int],
) -> None:
    """Time each of `widths` for one row, for the most rows, and in between, for a second or two in all.

    A step without drafts is started before the step before has ended; one with drafts is started afterwards.
    The model's caches must be able to go back. What is not measured is taken to be like what is. A GPU has then seen
    such steps with gaps and of long rows as well, and chosen as many tokens: to compile a kernel takes seconds there.
    Windows of every number of rows have been traced then, as far as there was time.
    """
    first = kv.new_caches(model)
    mx.eval(kv.read_alone(model, first, _PROMPT))
    vocab_size = model(mx.array([_PROMPT]), cache=kv.new_caches(model)).shape[-1]
    counts = sorted({1, min(8, rows_max), rows_max})
    for count in counts:
        rows = [Row(RowRequest(row, _PROMPT, 1), vocab_size, 2 * len(_PROMPT)) for row in range(count)]
        wide = [width for width in widths if count * width <= positions_max]
        steps = _Steps(
            model,
            kv.KVBatch.merge([first] * count, [len(_PROMPT)] * count),
            rows,
            Choosing(vocab_size, MaskFiller(vocab_size, [])),
        )
        steps.time(costs, wide, _SECONDS_MAX / len(counts))
    until_s = time.perf_counter() + _TRACES_S
    for width in widths if on_gpu() else ():
        layers.trace(model, min(rows_max, positions_max // width), until_s, width)
    for tokens in _LONG_TOKENS if on_gpu() else ():
        long, prompt = kv.new_caches(model), [1] * tokens
        mx.eval(kv.read_alone(model, long, prompt))
        row = Row(RowRequest(0, prompt, 1), vocab_size, 2 * tokens)
        batch = kv.KVBatch.merge([long], [tokens])
        _Steps(model, batch, [row], Choosing(vocab_size, MaskFiller(vocab_size, []))).window(widths[0])


class _Steps:
    """Steps of some rows, which go back to where they were; each kind returns the seconds of one."""

    def __init__(self, model: Any, caches: kv.KVBatch, rows: Sequence[Row], choosing: Choosing) -> None:
        self._model = model
        self._kv = caches
        self._rows = rows
        self._choosing = choosing
        choosing.set_rows(rows)

    def time(self, costs: StepCosts, widths: Sequence[int], seconds: float) -> None:
        """Time width 1 on rows of equal length, and verify blocks on rows with masked slots, as in use."""
        even = [len(_PROMPT)] * len(self._rows)
        best_s = self._best({1: self.ahead, WAITED: self.waited}, even, seconds / 2)
        kinds: dict[int, Callable[[], float]] = {width: partial(self.window, width) for width in widths}
        uneven = [len(_PROMPT) + (row > 0) for row in range(len(self._rows))]
        best_s |= self._best(kinds, uneven, seconds / 2)
        timed = {width: its_s for width, its_s in best_s.items() if its_s < math.inf}
        if 1 in timed:
            costs.measured(len(self._rows), timed)
        if on_gpu():
            self.waited()

    def _best(
        self, kinds: Mapping[int, Callable[[], float]], held: list[int], seconds: float
    ) -> dict[int, float]:
        """The least of a few times of each kind, which are taken in turns: what holds one up may hold up another."""
        # The first of a kind compiles. On a GPU that takes seconds, and else whoever came first would wait for it.
        until_s = math.inf if on_gpu() else time.perf_counter() + seconds
        best_s = dict.fromkeys(kinds, math.inf)
        for number in range(1 + _TRIES):
            if number == 1:
                until_s = min(until_s, time.perf_counter() + seconds)
            for kind, steps in kinds.items():
                if time.perf_counter() > until_s:
                    return best_s
                its_s = steps()
                if number:
                    best_s[kind] = min(best_s[kind], its_s)
                self._go_back(held)
        return best_s

    def ahead(self) -> float:
        """Steps of width 1, each of which starts before the one before has ended."""
        landed = _Landed()
        waiting = self._start(mx.array([_PROMPT[:1]] * len(self._rows), dtype=mx.uint32))
        for _ in range(_AHEAD_STEPS + 1):
            coming = self._start(waiting.tokens[:, None])
            landed.read(waiting)
            waiting = coming
        waiting.read()
        return landed.step_s

    def waited(self) -> float:
        """A step of width 1 from tokens that are known."""
        started_s = time.perf_counter()
        self._start(mx.array([_PROMPT[:1]] * len(self._rows), dtype=mx.uint32), idle=True).read()
        return time.perf_counter() - started_s

    def window(self, width: int) -> float:
        """A window likewise."""
        started_s = time.perf_counter()
        window = VerifyBlock.of(self._rows, [Draft(_PROMPT[: width - 1], "")] * len(self._rows))
        self._start(window.inputs, window, idle=True).read()
        return time.perf_counter() - started_s

    def _start(self, inputs: mx.array, window: VerifyBlock | None = None, *, idle: bool = False) -> Choices:
        logits = self._model(inputs, cache=self._kv.begin_step(inputs, idle=on_gpu() and idle))
        choices = (
            self._choosing.one(logits[:, -1, :]) if window is None else self._choosing.several(logits, window)
        )
        kv.start(choices.arrays())
        return choices

    def _go_back(self, held: list[int]) -> None:
        self._kv.roll_back([before - after for before, after in zip(self._kv.lengths, held, strict=True)])


class _Landed:
    """Steps that were waited for while the next was on its way: `step_s` is what one took, from the first to the last
    of them."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def read(self, choices: Choices) -> Any:
        tokens, _ = choices.read()
        self._times_s.append(time.perf_counter())
        return tokens

    @property
    def step_s(self) -> float:
        return (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)
