"""Measures the cost of verify blocks in plain decode steps, when an engine starts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import mlx.core as mx

from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import Draw
from zmqengine.engine.sampling.sampler import Sampled, Sampler
from zmqengine.engine.speculation.costs import WidthCosts, measured_rows

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


def measure_costs(
    runner: ModelRunner,
    draw: Draw,
    costs: WidthCosts,
    *,
    vocab_size: int,
    rows_max: int,
    widths: Sequence[int],
    positions_max: int,
    is_gpu: bool,
) -> None:
    """Time steps of one row, of some and of `rows_max` into `costs`, for a few seconds in all, unless it has costs.

    The shortest of a few tries counts, since the machine may have other work; beside costs of an earlier start, of one
    more try. Widths without time for a try are left out. On a GPU this also compiles verify blocks, of long rows too,
    which would take seconds while a request waits.
    """
    is_known, left_s = costs.has_all(widths, positions_max) and not costs.again, _SECONDS_MAX
    for rows in measured_rows(rows_max):
        known = [1, *(width for width in widths if rows * width <= positions_max)]
        timer = _Timer(runner, draw, vocab_size, [_PROMPT_TOKENS + index % 2 for index in range(rows)])
        if is_gpu:
            timer.best_s(known, 1, math.inf)
        if not is_known:
            began_s = time.perf_counter()
            if earlier := costs.seconds.get(rows, {}):
                now = timer.best_s(known, 1, began_s + left_s)
                costs.seconds[rows] = {
                    width: min(each.get(width, math.inf) for each in (earlier, now))
                    for width in {*earlier, *now}
                }
            else:
                costs.seconds[rows] = timer.best_s(
                    known, _TRIES, began_s + left_s, began_s + min(_TRIES_S, left_s)
                )
            left_s -= time.perf_counter() - began_s
        timer.close()
    if is_gpu:
        for tokens in _LONG_PROMPT_TOKENS:
            timer = _Timer(runner, draw, vocab_size, [tokens])
            timer.best_s(widths, 1, math.inf)
            timer.close()


class _Timer:
    """Rows of a few prompt lengths, whose steps are timed."""

    def __init__(self, runner: ModelRunner, draw: Draw, vocab_size: int, prompts: Sequence[int]) -> None:
        self._runner = runner
        self._rows = [
            Row(RowRequest(number, [1] * (tokens + 1)), vocab_size, 1 << 20)
            for number, tokens in enumerate(prompts)
        ]
        self._sampler = Sampler(vocab_size, draw)
        self._sampler.set_rows(self._rows)
        for row, tokens in zip(self._rows, prompts, strict=True):
            row.cache = runner.open(tokens + max(1, _PLAIN_STEPS))
            prompt = mx.array(row.tokens[:-1], mx.uint32)
            mx.eval(runner.forward([RowPiece(row, 0, tokens)], prompt, 1).marker)
            row.computed_tokens = tokens

    def close(self) -> None:
        """Free the caches."""
        for row in self._rows:
            row.cache.close(is_finite=True)

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
        """Seconds of a step: of several plain ones, one ahead of another as in the engine, or of one verify block.

        Where states follow, a step begins with the accepted tokens of the block before it, here all of that one's.
        """
        if width == 1 or not self._runner.ends_apart:
            return self._steps_s(width)
        self._steps_s(width)
        for row in self._rows:
            row.computed_tokens += width
        seconds = self._steps_s(width)
        for row in self._rows:
            row.computed_tokens -= width
        return seconds

    def _steps_s(self, width: int) -> float:
        count = 1 if width > 1 else _PLAIN_STEPS
        started_s = time.perf_counter()
        previous: Sampled | None = None
        for _ in range(count):
            pieces = [RowPiece(row, row.computed_tokens, width, samples=width) for row in self._rows]
            tokens = mx.array([1] * (width * len(self._rows)), mx.uint32)
            if previous is not None:
                tokens = previous.tokens.astype(mx.uint32)
            logits = self._runner.forward(pieces, tokens, width).logits
            assert logits is not None
            if previous is not None and not self._runner.launches_ahead:
                previous.read()
            drafted = None if width == 1 else mx.full((len(self._rows), width - 1), 1, mx.int32)
            sampled = self._sampler.sample(logits, drafted)
            mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
            if previous is not None and self._runner.launches_ahead:
                previous.read()
            previous = sampled
        assert previous is not None
        previous.read()
        return (time.perf_counter() - started_s) / count
