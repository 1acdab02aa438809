"""The sampler of a batch: from logits to tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from zmqengine.engine.interface import TokenLogprobs
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import Draw, DrawPlan, EndBan, widened_indices
from zmqengine.engine.sampling.penalties import Penalties

Mask = Callable[[mx.array], mx.array]
"""Forbids tokens: returns logits [rows * width, vocab] with minus infinity for them."""


class LogprobArrays(NamedTuple):
    """Log-probabilities of some tokens on the device: `chosen` [tokens], and the likeliest ones [tokens, top]."""

    chosen: mx.array
    top_tokens: mx.array | None
    top_logprobs: mx.array | None


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens [rows * width] on the device, and what the host reads of them: `width` tokens of each row.

    `measured`: rows that want log-probabilities, whose `logprobs` are flattened over the width too.
    """

    tokens: mx.array
    width: int
    plan: DrawPlan
    host_arrays: tuple[mx.array, ...]
    measured: Sequence[Row] = ()
    logprobs: LogprobArrays | None = None

    def arrays(self) -> list[mx.array]:
        """Every array of this result, for one evaluation."""
        logprobs = [] if self.logprobs is None else [one for one in self.logprobs if one is not None]
        return [self.tokens, *self.host_arrays, *logprobs]

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the tokens and their logits. A finite logit may be read as 0."""
        return self.plan.read(self.host_arrays, self.tokens.size)

    def read_logprobs(self) -> dict[tuple[int, int], TokenLogprobs]:
        """Log-probabilities by row id and the token's position in the step."""
        if self.logprobs is None:
            return {}
        found = read_logprobs(self.logprobs)
        return {
            (row.id, position): found[index]._replace(top=found[index].top[: row.logprobs])
            for number, row in enumerate(self.measured)
            for position, index in enumerate(range(number * self.width, (number + 1) * self.width))
        }


class Sampler:
    """Samples the next tokens of the rows of a batch. `draw` is the back-end's way to draw them.

    Logits get bias and penalties, then a mask and `min_tokens`; log-probabilities are those before
    the mask. A token depends on the logits, the seed of its row and its output index, and not on the rows beside it.
    """

    def __init__(self, vocab_size: int, draw: Draw) -> None:
        self._vocab_size = vocab_size
        self._draw = draw
        self._plan = draw.plan([], vocab_size)
        self._penalties = Penalties(vocab_size)
        self._end_ban = EndBan([])
        self._measured: list[Row] = []
        self._measured_index: mx.array | None = None

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Follow a change of the batch."""
        self._plan = self._draw.plan(rows, self._vocab_size)
        self._penalties.set_rows(rows)
        self._end_ban = EndBan(rows)
        indices = [index for index, row in enumerate(rows) if row.logprobs is not None]
        self._measured = [rows[index] for index in indices]
        self._measured_index = mx.array(indices) if indices else None

    def sample(self, logits: mx.array, drafted: mx.array | None = None, mask: Mask | None = None) -> Sampled:
        """Tokens for `logits` [rows, width, vocab], the same rows as those of `set_rows`.

        `drafted` [rows, width - 1]: draft tokens, -1 for none, as if all of them were accepted.
        """
        rows, width, vocab = logits.shape
        penalised = self._penalties.index is not None
        if penalised:
            logits = self._penalties.apply(logits, drafted)
        flat = logits.reshape(-1, vocab)
        allowed = flat if mask is None else mask(flat)
        if self._end_ban.rows:
            allowed = self._end_ban.apply(allowed, width)
        tokens, host_arrays = self._plan.draw(allowed, width)
        if penalised:
            self._penalties.count(tokens.reshape(rows, width), drafted)
        if self._measured_index is None:
            return Sampled(tokens, width, self._plan, host_arrays)
        index = widened_indices(self._measured_index, width)
        top = max(row.logprobs or 0 for row in self._measured)
        logprobs = measure(flat[index], tokens[index], top)
        return Sampled(tokens, width, self._plan, host_arrays, self._measured, logprobs)


def read_logprobs(arrays: LogprobArrays) -> list[TokenLogprobs]:
    """The log-probabilities of each token; waits for them."""
    chosen: Any = arrays.chosen.tolist()
    if arrays.top_tokens is None or arrays.top_logprobs is None:
        return [TokenLogprobs(one, []) for one in chosen]
    best: Any = zip(
        chosen, cast(Any, arrays.top_tokens.tolist()), cast(Any, arrays.top_logprobs.tolist()), strict=True
    )
    return [TokenLogprobs(one, list(zip(tokens, logprobs, strict=True))) for one, tokens, logprobs in best]


def measure(logits: mx.array, tokens: mx.array, top: int) -> LogprobArrays:
    """Log-probabilities of `tokens` [tokens] in `logits` [tokens, vocab], and of the `top` likeliest, best first."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if not top:
        return LogprobArrays(chosen[:, 0], None, None)
    top = min(top, logits.shape[-1])
    best = mx.argpartition(-logits, top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logits, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return LogprobArrays(
        chosen[:, 0],
        mx.take_along_axis(best, order, axis=-1),
        mx.take_along_axis(values, order, axis=-1) - total,
    )
