"""Verify blocks: one model call reads the last token of each row and its draft tokens, and verifies them.

The token at an output index depends on the tokens before it, a seed and that index, and on nothing else. The model's
own choice at every position of the block therefore decides: draft tokens are accepted up to the first that differs from
the choice, and that choice is output as well. The output equals the one without drafts; there is no ratio test, since
there is no second distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda import drawing
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.penalties import Penalties
from zmqengine.engine.sampling.sampler import LogprobArrays, Plan, choose, measure, widened_places


class Draft(NamedTuple):
    """Draft tokens of one row, and the name of their source."""

    tokens: Sequence[int]
    source: str


class Measured(NamedTuple):
    """Indices of the rows that want log-probabilities, and the number of top alternatives."""

    places: Sequence[int]
    top: int


class Choices(NamedTuple):
    """Tokens chosen by a step, [rows] or [rows, width], and log-probabilities of the rows that want them, flattened
    over the width. The host reads `told`, small arrays that a kernel filled, or else the tokens and their `logits`."""

    tokens: mx.array
    logits: mx.array | None
    logprobs: LogprobArrays | None
    told: tuple[mx.array, ...] = ()

    def arrays(self) -> list[mx.array]:
        """Every array of this result, for one evaluation."""
        return [
            array
            for array in (self.tokens, self.logits, *self.told, *(self.logprobs or ()))
            if array is not None
        ]

    def read(self) -> tuple[Any, Any]:
        """Wait for tokens and logits, as lists. A finite logit may be read as 0."""
        if self.logits is not None:
            return self.tokens.tolist(), self.logits.tolist()
        tokens, logits = drawing.read(self.told, self.tokens.size)
        if self.tokens.ndim == 1:
            return tokens, logits
        width = self.tokens.shape[1]
        starts = range(0, len(tokens), width)
        return [tokens[at : at + width] for at in starts], [logits[at : at + width] for at in starts]


@dataclass(frozen=True)
class VerifyBlock:
    """A verify block: the last token of each row and its draft tokens, padded to `width` tokens a row."""

    drafts: list[Draft | None]
    width: int
    inputs: mx.array
    drafted: mx.array

    @classmethod
    def of(cls, rows: Sequence[Row], drafts: list[Draft | None], widths: Sequence[int] = ()) -> VerifyBlock:
        """The verify block of these rows, whose tokens are all known. With `widths`, in rising order, it takes the
        smallest that holds every draft: some devices compile for each width."""
        width = 1 + max(len(draft.tokens) for draft in drafts if draft is not None)
        width = next((known for known in widths if known >= width), width)
        drafted = _table(drafts, width - 1)
        last = np.array([row.tokens[-1] for row in rows])
        inputs = np.concatenate([last[:, None], np.maximum(drafted, 0)], axis=1)
        return cls(drafts, width, mx.array(inputs.astype(np.uint32)), mx.array(drafted))

    def accepted(self, place: int, tokens: Sequence[int]) -> int:
        """The number of draft tokens of row `place` that equal the chosen `tokens`, up to the first that differs."""
        draft = self.drafts[place]
        count = 0
        if draft is not None:
            while count < len(draft.tokens) and draft.tokens[count] == tokens[count]:
                count += 1
        return count

    def choose(
        self,
        logits: mx.array,
        plan: Plan,
        penalties: Penalties,
        measured: Measured,
        mask: Callable[[mx.array], mx.array],
    ) -> Choices:
        """Choose a token at each position of `logits` [rows, width, vocab], as if all drafts before it were accepted.

        `mask` forbids tokens, in logits [rows * width, vocab]; log-probabilities are taken before it.
        """
        rows, width, vocab = logits.shape
        if penalties.index is not None:
            logits = penalties.apply_window(logits, self.inputs[:, 1:])
        raw = logits.reshape(-1, vocab)
        flat = mask(raw)
        tokens, chosen, told = choose(flat, plan, width)
        logprobs = None
        if measured.places:
            index = widened_places(mx.array(list(measured.places)), width)
            logprobs = measure(raw[index], tokens[index], measured.top)
        tokens = tokens.reshape(rows, width)
        if penalties.index is not None:
            penalties.count_window(tokens, _kept(tokens, self.drafted))
        return Choices(tokens, None if chosen is None else chosen.reshape(rows, width), logprobs, told)


def _kept(tokens: mx.array, drafted: mx.array | None) -> mx.array:
    """Mask [rows, width] of the chosen `tokens` that are output: the first, and each after an accepted draft."""
    first = mx.ones((tokens.shape[0], 1), mx.int32)
    if drafted is None:
        return first
    right = drafted == tokens[:, :-1].astype(mx.int32)
    return mx.concatenate([first, mx.cumprod(right.astype(mx.int32), axis=-1)], axis=-1)


def _table(drafts: Sequence[Draft | None], width: int) -> np.ndarray:
    """Drafts as an array [rows, width], padded with -1, which equals no token."""
    table = np.full((len(drafts), width), -1, np.int32)
    for place, draft in enumerate(drafts):
        if draft is not None:
            tokens = draft.tokens[:width]
            table[place, : len(tokens)] = tokens
    return table
