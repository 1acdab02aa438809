"""Measures the cost of verify blocks in plain decode steps, when an engine starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.autotune import layers
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.interface import RowRequest, StepResult
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.verify_block import Draft, VerifyBlock
from zmqengine.engine.step.decode import DecodeBatch

_SECONDS_MAX = 1.5
_TRIES = 5
_STEPS = 2
_PROMPT_TOKENS = 32
# A GPU reads longer rows with attention kernels of their own.
_LONG_PROMPT_TOKENS = (256, 1024)
_TRACES_S = 2.0


class FixedWidth:
    """Plans a verify block of `width` in every step, with draft tokens that nobody believes; 1 for plain steps."""

    def __init__(self) -> None:
        self.width = 1

    def is_worth_waiting(self, rows: Sequence[Row], *, changed: bool) -> bool:
        """Whether the step is a verify block."""
        return self.width > 1

    def plan(self, rows: Sequence[Row]) -> VerifyBlock | None:
        """The verify block."""
        if self.width == 1:
            return None
        return VerifyBlock.of(rows, [Draft([1] * (self.width - 1), "")] * len(rows))

    def commit(self, rows: Sequence[Row], block: VerifyBlock, accepted: Sequence[int]) -> None:
        """Learns nothing."""


def measure_costs(
    model: Any,
    new_batch: Callable[[FixedWidth], DecodeBatch],
    costs: WidthCosts,
    *,
    vocab_size: int,
    rows_max: int,
    widths: Sequence[int],
    positions_max: int,
    kernels: kv.KVKernels,
) -> None:
    """Time steps of one row, of some and of `rows_max` into `costs`, for a second or two in all.

    The shortest of a few tries counts: the machine may have other work. Numbers of rows for which there is no time are
    left out. A GPU has compiled verify blocks then, of long rows as well: that takes seconds while a request waits.
    """
    began_s = time.perf_counter()
    counts = sorted({1, min(8, rows_max), rows_max})
    for number, rows in enumerate(counts):
        if time.perf_counter() > began_s + _SECONDS_MAX:
            break
        known = [1, *(width for width in widths if rows * width <= positions_max)]
        timer = _Timer(
            model, new_batch, vocab_size, [_PROMPT_TOKENS + place % 2 for place in range(rows)], kernels
        )
        costs.seconds[rows] = timer.best_s(known, began_s + _SECONDS_MAX * (number + 1) / len(counts))
    if on_gpu():
        for width in widths:
            traces_until_s = time.perf_counter() + _TRACES_S
            layers.trace(model, min(rows_max, positions_max // width), traces_until_s, width)
        for tokens in _LONG_PROMPT_TOKENS:
            _Timer(model, new_batch, vocab_size, [tokens], kernels).best_s(widths, 0.0)


class _Timer:
    """Rows of a few prompt lengths in a decode batch of their own, whose steps are timed."""

    def __init__(
        self,
        model: Any,
        new_batch: Callable[[FixedWidth], DecodeBatch],
        vocab_size: int,
        prompts: Sequence[int],
        kernels: kv.KVKernels,
    ) -> None:
        self._planner = FixedWidth()
        self._batch = new_batch(self._planner)
        rows, alone = [], {}
        for number, tokens in enumerate(prompts):
            row = Row(RowRequest(number, [1] * (tokens + 1)), vocab_size, 1 << 20)
            row.held = tokens
            rows.append(row)
            if tokens not in alone:
                alone[tokens] = kv.new_caches(model)
                mx.eval(kv.read_alone(model, alone[tokens], [1] * tokens))
        self._batch.join(rows, kv.KVBatch.merge([alone[tokens] for tokens in prompts], prompts, kernels))

    def best_s(self, widths: Sequence[int], until_s: float) -> dict[int, float]:
        """Seconds of a step by width: the least of one try or more, in turns."""
        best_s = dict.fromkeys(widths, math.inf)
        # The first try of a GPU compiles.
        for number in range(_TRIES + on_gpu()):
            if number > on_gpu() and time.perf_counter() > until_s:
                break
            for width in widths:
                best_s[width] = min(best_s[width], self._step_s(width))
        return best_s

    def _step_s(self, width: int) -> float:
        self._planner.width = width
        self._step()
        started_s = time.perf_counter()
        for _ in range(_STEPS):
            self._step()
        return (time.perf_counter() - started_s) / _STEPS

    def _step(self) -> None:
        self._batch.step(StepResult(), lambda: True)
