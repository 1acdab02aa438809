"""Several tokens a row in one step: the model reads drafts of them in one call, and says what it would have made.

The token at an output index depends on the tokens before it, a seed and that index, and on nothing else. So the model's
own choice at every place of a window decides: a drafted token is accepted while it is the one that was chosen, and the
first choice that differs is kept as well. The output is the one that there would have been without a draft.
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
    """What may follow the tokens of a row, and the name of who says so."""

    tokens: Sequence[int]
    source: str


class Measured(NamedTuple):
    """Which rows of a batch want log-probabilities, and of how many of the best tokens."""

    places: Sequence[int]
    top: int


class Choices(NamedTuple):
    """What the model chose at each place of a window: tokens, [rows, width] or [rows], and log-probabilities of the
    rows that want them, [their number * width]. The host learns of it from `told`, or else from the tokens and their
    `logits`."""

    tokens: mx.array
    logits: mx.array | None
    logprobs: LogprobArrays | None
    told: tuple[mx.array, ...] = ()

    def arrays(self) -> list[mx.array]:
        """All that is to be computed."""
        return [
            array
            for array in (self.tokens, self.logits, *self.told, *(self.logprobs or ()))
            if array is not None
        ]

    def read(self) -> tuple[Any, Any]:
        """Tokens and logits as lists, waited for. Logits may be 0 for what is a number."""
        if self.logits is not None:
            return self.tokens.tolist(), self.logits.tolist()
        tokens, logits = drawing.read(self.told, self.tokens.size)
        if self.tokens.ndim == 1:
            return tokens, logits
        width = self.tokens.shape[1]
        starts = range(0, len(tokens), width)
        return [tokens[at : at + width] for at in starts], [logits[at : at + width] for at in starts]


@dataclass(frozen=True)
class Window:
    """A verify block: the last token of each row and its draft tokens, padded to `width` tokens a row."""

    drafts: list[Draft | None]
    width: int
    inputs: mx.array
    drafted: mx.array

    @classmethod
    def of(cls, rows: Sequence[Row], drafts: list[Draft | None], widths: Sequence[int] = ()) -> Window:
        """The window of these rows, whose tokens are all known. Where there are `widths`, in rising order, it is as
        wide as the least of them that holds all drafts: some devices prepare for each width."""
        width = 1 + max(len(draft.tokens) for draft in drafts if draft is not None)
        width = next((known for known in widths if known >= width), width)
        drafted = _table(drafts, width - 1)
        last = np.array([row.tokens[-1] for row in rows])
        inputs = np.concatenate([last[:, None], np.maximum(drafted, 0)], axis=1)
        return cls(drafts, width, mx.array(inputs.astype(np.uint32)), mx.array(drafted))

    def accepted(self, place: int, tokens: Sequence[int]) -> int:
        """How many tokens of the draft at `place` are those that were chosen."""
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
        """The choices of `logits` [rows, width, vocab], each as if the tokens before it had been accepted.

        `mask` rules out what may not come, of logits [rows * width, vocab]; log-probabilities are those before it.
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
    """Which of the chosen `tokens` [rows, width] stand: those after an accepted draft [rows, width - 1], and the first
    of all."""
    first = mx.ones((tokens.shape[0], 1), mx.int32)
    if drafted is None:
        return first
    right = drafted == tokens[:, :-1].astype(mx.int32)
    return mx.concatenate([first, mx.cumprod(right.astype(mx.int32), axis=-1)], axis=-1)


def _table(drafts: Sequence[Draft | None], width: int) -> np.ndarray:
    """Drafts as [rows, width], and -1 where there is none: no token is equal to that."""
    table = np.full((len(drafts), width), -1, np.int32)
    for place, draft in enumerate(drafts):
        if draft is not None:
            tokens = draft.tokens[:width]
            table[place, : len(tokens)] = tokens
    return table
