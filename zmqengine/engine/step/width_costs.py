"""Measures the cost of verify blocks in plain decode steps, when an engine starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.host.device import CPU, Device
from zmqengine.engine.interface import RowRequest, StepResult
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.verify_block import Draft, VerifyBlock
from zmqengine.engine.step.decode import DecodeBatch
from zmqengine.engine.step.packed import forward

# Maximum seconds of all measurements.
_SECONDS_MAX = 6.0
# Least measurements of each width.
_TRIES = 3
# Seconds of tries: a small model's take milliseconds, and other programs may delay the first few of one width. A width
# that wrongly seems as cheap as a plain step would cost throughput for as long as the worker runs.
_TRIES_S = 0.25
_PLAIN_STEPS = 4
_PROMPT_TOKENS = 32
# Lengths of rows: a GPU has other attention kernels for longer rows.
_LONG_PROMPT_TOKENS = (256, 1024)
_TRACES_S = 2.0


class FixedWidth:
    """Plans a verify block of `width` in every step, with arbitrary draft tokens; 1 for plain steps."""

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
    device: Device = CPU,
) -> None:
    """Time steps of one row, of some and of `rows_max` into `costs`, for a few seconds in all, unless it has costs.

    The shortest of a few tries counts, since the machine may have other work; beside costs of an earlier start, of one
    more try. Widths without time for a try are left out. On a GPU this also compiles verify blocks, of long rows too,
    which would take seconds while a request waits.
    """
    is_known, left_s = bool(costs.seconds) and not costs.again, _SECONDS_MAX
    for rows in sorted({1, min(8, rows_max), rows_max}):
        known = [1, *(width for width in widths if rows * width <= positions_max)]
        prompts = [_PROMPT_TOKENS + index % 2 for index in range(rows)]
        timer = _Timer(model, new_batch, vocab_size, prompts, kernels)
        if device.is_gpu:
            timer.best_s(known, 1, math.inf)
        if is_known:
            continue
        began_s = time.perf_counter()
        if earlier := costs.seconds.get(rows, {}):
            now = timer.best_s(known, 1, began_s + left_s)
            costs.seconds[rows] = {
                width: min(each.get(width, math.inf) for each in (earlier, now)) for width in {*earlier, *now}
            }
        else:
            costs.seconds[rows] = timer.best_s(
                known, _TRIES, began_s + left_s, began_s + min(_TRIES_S, left_s)
            )
        left_s -= time.perf_counter() - began_s
    if device.is_gpu:
        for width in widths if hasattr(model, "trace_steps") else ():
            traces_until_s = time.perf_counter() + _TRACES_S
            model.trace_steps(min(rows_max, positions_max // width), traces_until_s, width)
        for tokens in _LONG_PROMPT_TOKENS:
            _Timer(model, new_batch, vocab_size, [tokens], kernels).best_s(widths, 1, math.inf)


class _Timer:
    """A decode batch of rows of a few prompt lengths, whose steps are timed."""

    def __init__(
        self,
        model: Any,
        new_batch: Callable[[FixedWidth], DecodeBatch],
        vocab_size: int,
        prompts: Sequence[int],
        kernels: kv.KVKernels,
    ) -> None:
        self._model = model
        self._planner = FixedWidth()
        self._batch = new_batch(self._planner)
        rows, alone = [], {}
        for number, tokens in enumerate(prompts):
            row = Row(RowRequest(number, [1] * (tokens + 1)), vocab_size, 1 << 20)
            row.computed_tokens = tokens
            rows.append(row)
            if tokens not in alone:
                alone[tokens] = kv.new_caches(model)
                mx.eval(kv.prefill_row(model, alone[tokens], [1] * tokens))
        self._batch.join(rows, kv.KVBatch.merge([alone[tokens] for tokens in prompts], prompts, kernels))

    def best_s(
        self, widths: Sequence[int], tries: int, until_s: float, further_until_s: float = 0.0
    ) -> dict[int, float]:
        """The least seconds of a step by width, of tries in turns; without widths that were not tried in time.

        There are `tries` and, until `further_until_s`, further ones.
        """
        best_s: dict[int, float] = {}
        while tries > 0 or time.perf_counter() < further_until_s:
            for width in widths:
                if time.perf_counter() > until_s:
                    return best_s
                best_s[width] = min(best_s.get(width, math.inf), self._step_s(width))
            tries -= 1
        return best_s

    def _step_s(self, width: int) -> float:
        self._planner.width = width
        # A call launches one plain step and lands another: only several calls take the time of as many steps.
        count = 1 if width > 1 else _PLAIN_STEPS
        self._take_steps(count)
        started_s = time.perf_counter()
        self._take_steps(count)
        return (time.perf_counter() - started_s) / count

    def _take_steps(self, count: int) -> None:
        for _ in range(count):
            result = StepResult()
            if (segment := self._batch.begin(result, lambda: True)) is not None:
                (logits,) = forward(self._model, [segment])
                self._batch.complete(logits, result)
